"""The decayed diagonal of the key Gram matrix for all tokens of a chunk at once:
A_i = exp(G_i) A + sum_j exp(G_i - G_j) beta_j k_j^2, a masked matrix product. A_(i-1) is the same, one token later."""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.sequences import Chunks, Sequences
from ..shared.decay import HeadDecay

CHUNK = 64


def chunked(
    k: Tensor, g: Tensor, beta: Tensor, A: Tensor, before: bool, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    chunks = Chunks(sequences, CHUNK, k.device)
    decay = HeadDecay(chunks.split(g).exp()[..., None])
    inside = decay.between @ chunks.split(beta[..., None] * k.square())

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept, written = parts
        return (kept * states[0] + written,)

    (start,), (final,) = chunks.scan(step, (A[:, :, None],), decay.across(inside), inside[:, :, -1:])
    gram = decay.carry_from_start(start) + inside
    if before:
        gram = torch.cat([start, gram[:, :, :-1]], 2)
    return chunks.merge(gram), (final[:, :, 0],)
