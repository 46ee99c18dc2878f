"""The inverse of a fading Gram matrix chunk by chunk: G at the chunks' starts is a running sum, from which all tokens of all
chunks are solved at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...framework.sequences import Chunks, Sequences
from ..decay import Decay, HeadDecay
from ..ridge.system import System
from .prefixes import Steps, solve_prefixes
from .refresh import RefreshChunks, refresh_inverse
from .regularization import diagonal, missing_prior

__all__ = ["chunked"]

CHUNK = 64


def chunked(
    u: Tensor, b: Tensor | None, gain: Tensor | None, g: Tensor | None, refresh: Tensor | None, G: Tensor,
    sequences: Sequences, *, ridge: float,
) -> tuple[Tensor, tuple[Tensor]]:  # fmt: skip
    chunks = Chunks(sequences, CHUNK, u.device) if refresh is None else RefreshChunks(sequences, CHUNK, refresh[..., 0])
    U = chunks.split(u)
    B = U if b is None else chunks.split(b)
    ones = torch.ones_like(U[..., :1])
    gains = ones if gain is None else chunks.split(gain)[..., None]
    a = ones if g is None else chunks.split(g)[..., None].exp()
    decay = Decay(len(U)) if g is None else HeadDecay(a)
    restore = missing_prior(a, ridge)
    kept, (weights,), (prior,) = decay.carry_from_start(ones), decay.scores(gains, ones), decay.scores(restore, ones)
    prior = prior.sum(-1, keepdim=True)

    inputs = {"written": decay.carry_to_end(gains * U).mT @ U + diagonal(prior[:, :, -1, 0], G)}
    if g is not None:
        inputs["kept"] = decay.across(U)
    if refresh is not None:
        inputs["refresh"] = chunks.split(refresh).sum(2)[..., None, None]

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        part = dict(zip(inputs, parts))
        G = part["kept"] * states[0] if "kept" in part else states[0]
        G = G + part["written"]
        return (refresh_inverse(G, part["refresh"]) if "refresh" in part else G,)

    (start,), (final,) = chunks.scan(step, (G,), *inputs.values())
    steps = Steps(start, U, gains[..., 0], a[..., 0], restore[..., 0])
    x = chunks.merge(solve_prefixes(B, System(start, U, kept, weights, prior), steps, ridge))
    if refresh is not None:
        x = x + refresh[..., None] * (u if b is None else b)
    return x if gain is None or b is not None else gain[..., None] * x, (final,)
