"""The state of one decayed memory after every token, by matrix products, and the adjoint of that map.

A chunk is cut into s sub-chunks of c tokens. Rows n are chunk x head, rows m = n s are sub-chunks; S_b is the state at a
sub-chunk's start (its "bound").
    S_b = over[b, 0] S_start + sum_{i < b} over[b, 1 + i] written_i         written_i: what sub-chunk i adds until its end
    S_t = within[t, 0] S_b + sum_{j <= t} within[t, 1 + j] key_j value_j^T          inside a sub-chunk
within and over hold products of decays (0 for what comes later), so nothing is divided and decay 0 needs no care.
The bounds and all that is small are computed for all rows at once; the states, K x V numbers per token, for some of the
sub-chunks at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ingredients(NamedTuple):
    """What the states of sub-chunks are made of, or the gradients in these: bounds [m,1,KV], from_bound [m,c,1],
    decayed_keys [m,c,cK] (token written; token read and channel), values [m,c,V]."""

    bounds: Tensor
    from_bound: Tensor
    decayed_keys: Tensor
    values: Tensor

    def part(self, rows: slice) -> Ingredients:
        return Ingredients(*(x[rows] for x in self))

    def empty_like(self) -> Ingredients:
        return Ingredients(*(x.new_empty(x.shape) for x in self))

    def states(self, out: Tensor) -> Tensor:
        """Written to out [m,c,K,V]."""
        torch.mul(self.bounds, self.from_bound, out=out.flatten(2))
        out.flatten(1, 2).baddbmm_(self.decayed_keys.mT, self.values)
        return out

    def adjoint(self, d_states: Tensor, out: Ingredients) -> None:
        """Gradients written to out, from the gradient in the states [m,c,K,V]."""
        by_key, by_token = d_states.flatten(1, 2), d_states.flatten(2)
        torch.bmm(self.from_bound.mT, by_token, out=out.bounds)
        torch.bmm(self.bounds, by_token.mT, out=out.from_bound.mT)
        torch.bmm(self.values, by_key.mT, out=out.decayed_keys)
        torch.bmm(self.decayed_keys, by_key, out=out.values)


class Memory:
    """keys [n,s,c,K], values [n,s,c,V], within [n,s,c,1+c], over [n,s,s], start [n,K,V]."""

    def __init__(self, keys: Tensor, values: Tensor, within: Tensor, over: Tensor, start: Tensor) -> None:
        self.keys, self.values, self.over = keys, values, over
        self.from_token = within[..., 1:]
        self.to_end = self.from_token[..., -1, :, None]
        written = (keys * self.to_end)[:, :-1].mT @ values[:, :-1]
        self.sources = torch.cat([start[:, None], written], 1).flatten(2)
        self.ingredients = Ingredients(
            (over @ self.sources).flatten(0, 1)[:, None],
            within[..., :1].flatten(0, 1),
            (self.from_token.mT.contiguous()[..., None] * keys[..., None, :]).flatten(0, 1).flatten(2),
            values.flatten(0, 1),
        )

    def gradients(self, d: Ingredients) -> tuple[Tensor, ...]:
        """Gradients in keys, values, within, over and start, from those in the ingredients."""
        d_decayed_keys = d.decayed_keys.view(*self.keys.shape[:3], *self.keys.shape[2:])  # [n,s,j,t,K]
        d_keys = (self.from_token.mT[..., None, :] @ d_decayed_keys)[..., 0, :]
        d_from_token = (d_decayed_keys @ self.keys[..., None])[..., 0].mT
        d_values = d.values.view_as(self.values)

        d_bounds = d.bounds.view_as(self.sources)
        d_over = d_bounds @ self.sources.mT
        d_sources = (self.over.mT @ d_bounds).unflatten(-1, (self.keys.shape[-1], -1))
        d_written, keys, to_end = d_sources[:, 1:], self.keys[:, :-1], self.to_end[:, :-1]
        d_kept_keys = self.values[:, :-1] @ d_written.mT
        d_keys[:, :-1] += to_end * d_kept_keys
        d_values[:, :-1] += (keys * to_end) @ d_written
        d_from_token[:, :-1, -1] += (d_kept_keys * keys).sum(-1)
        d_within = torch.cat([d.from_bound.view_as(d_from_token[..., :1]), d_from_token], -1)
        return d_keys, d_values, d_within, d_over, d_sources[:, 0]
