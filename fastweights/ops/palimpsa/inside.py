"""Reading the posterior inside chunks, with a backward that recomputes: the K x V states of a token exist for a few
sub-chunks at a time, forward and backward.

Per token, with I = J + prior, X = M / I, and do, dw the gradients in o and in the variance w:
    o = X^T q             dq = X do + 2 q * (1/I dw)          dM_t = q do^T / I
    w = (1/I)^T q^2       dJ_t = -(q do^T * X) / I - q^2 dw^T / I^2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Numbers held at a time of the states at sub-chunk starts, and of those after every token. On a CPU the latter should fit
# a core's own cache; where there are many cores they want more work at a time.
BOUNDS = 2**20
STATES = {"cpu": 2**18, "other": 2**24}


class ReadInside(torch.autograd.Function):
    """apply(variance, q, k, v, beta, within, over, prior, M, J) -> o and, if `variance`, the variance (else of no column).

    q (scaled), k [n,s,c,K]; v, beta, o [n,s,c,V]; within, over: see `Memory`; prior [n]; M, J [n,K,V] at the start of
    every chunk. Rows n are chunk x head."""

    @staticmethod
    def forward(ctx: Any, variance: bool, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.variance = variance
        ctx.save_for_backward(*inputs)
        q, _, v, *_ = inputs
        o, w = v.new_empty(v.shape), v.new_empty(*v.shape[:3], v.shape[3] if variance else 0)
        for rows in blocks(q, v):
            q_, o_, w_ = (x[rows].flatten(0, 1) for x in (q, o, w))
            for part, M, importance in Posterior(*(x[rows] for x in inputs[1:])).parts():
                read(q_[part], M.div_(importance), o_[part])
                if variance:
                    read(q_[part].square(), importance.reciprocal_(), w_[part])
        return o, w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dw: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = [x.new_empty(x.shape) for x in inputs]
        with torch.autocast(do.device.type, enabled=False):
            for rows in blocks(inputs[0], inputs[2]):
                found = differentiate(ctx.variance, *(x[rows] for x in (do, dw, *inputs)))
                for whole, x in zip(gradients, found):
                    whole[rows] = x
        return None, *gradients


def blocks(q: Tensor, v: Tensor) -> Iterator[slice]:
    """Rows that are taken together."""
    rows = max(1, BOUNDS // (q.shape[1] * q.shape[3] * v.shape[3]))
    return (slice(first, first + rows) for first in range(0, len(q), rows))


class Posterior:
    """The memory in a block of chunks, made for some of its sub-chunks at a time."""

    def __init__(
        self, k: Tensor, v: Tensor, beta: Tensor, within: Tensor, over: Tensor, prior: Tensor, M: Tensor, J: Tensor
    ) -> None:
        self.means = Memory(k, v, within, over, M)
        self.importances = Memory(k.square(), beta, within, over, J)
        n, s, c, K = k.shape
        self.prior = prior.repeat_interleave(s)[:, None, None, None]
        largest = STATES["cpu" if k.device.type == "cpu" else "other"] // (c * K * v.shape[3])
        self.space = k.new_empty(2, min(max(1, largest), n * s), c, K, v.shape[3])

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Sub-chunks and, in a space that the next ones use again, M and the importance after their tokens [m,c,K,V]."""
        size = self.space.shape[1]
        for first in range(0, len(self.prior), size):
            part = slice(first, first + size)
            M, importance = self.space[:, : len(self.prior[part])]
            self.means.ingredients.part(part).states(M)
            self.importances.ingredients.part(part).states(importance).add_(self.prior[part])
            yield part, M, importance


def read(q: Tensor, memory: Tensor, out: Tensor) -> None:
    """out [m,c,V] = memory [m,c,K,V]^T q [m,c,K]."""
    torch.bmm(q.flatten(0, 1)[:, None], memory.flatten(0, 1), out=out.flatten(0, 1)[:, None])


def differentiate(variance: bool, do: Tensor, dw: Tensor, q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Gradients in q, k, v, beta, within, over, prior, M, J of a block."""
    posterior = Posterior(k, *others)
    d_mean, d_importance = posterior.means.ingredients.empty_like(), posterior.importances.ingredients.empty_like()
    minus_dq, dprior = q.new_empty(q.shape), q.new_empty(q.shape[:2])
    q_, do_, dw_, minus_dq_, dprior_ = (x.flatten(0, 1) for x in (q, do, dw, minus_dq, dprior))
    for part, M, importance in posterior.parts():
        do_row = do_[part][:, :, None]
        spread = importance.reciprocal_()
        read_by_do = M.mul_(spread).mul_(-do_row)
        torch.sum(read_by_do, -1, out=minus_dq_[part])
        q_spread = spread.mul_(q_[part][..., None])
        if variance:
            dw_row = dw_[part][:, :, None]
            minus_dq_[part] -= 2 * (q_spread @ dw_row.mT)[..., 0]
            read_by_do.addcmul_(q_spread, dw_row, value=-1)
        dJ_t = read_by_do.mul_(q_spread)
        dM_t = q_spread.mul_(do_row)
        torch.sum(dJ_t, (1, 2, 3), out=dprior_[part])
        posterior.means.ingredients.part(part).adjoint(dM_t, d_mean.part(part))
        posterior.importances.ingredients.part(part).adjoint(dJ_t, d_importance.part(part))
    dk, dv, dwithin, dover, dM = posterior.means.gradients(d_mean)
    dk2, dbeta, dwithin2, dover2, dJ = posterior.importances.gradients(d_importance)
    return minus_dq.neg_(), dk + 2 * k * dk2, dv, dbeta, dwithin + dwithin2, dover + dover2, dprior.sum(1), dM, dJ


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
    """The state of one decayed memory after every token, by matrix products, and the adjoint of that map.

    A chunk is cut into s sub-chunks of c tokens. Rows n are chunk x head, rows m = n s are sub-chunks; S_b is the state at a
    sub-chunk's start (its "bound").
        S_b = over[b, 0] S_start + sum_{i < b} over[b, 1 + i] written_i         written_i: what sub-chunk i adds until its end
        S_t = within[t, 0] S_b + sum_{j <= t} within[t, 1 + j] key_j value_j^T          inside a sub-chunk
    within and over hold products of decays (0 for what comes later), so nothing is divided and decay 0 needs no care.
    The bounds and all that is small are computed for all rows at once; the states, K x V numbers per token, for some of the
    sub-chunks at a time.

    keys [n,s,c,K], values [n,s,c,V], within [n,s,c,1+c], over [n,s,s], start [n,K,V].
    """

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
