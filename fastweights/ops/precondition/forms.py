"""The decayed diagonal A of the key Gram matrix token by token, which is the specification, and chunk by chunk.

By chunks, A_i = exp(G_i) A + sum_j exp(G_i - G_j) beta_j k_j^2 is a masked matrix product. A_(i-1) is the same, one token later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from ..shared.decay import HeadDecay

CHUNK = 64


def reference(k: Tensor, g: Tensor, beta: Tensor, A: Tensor, before: bool) -> tuple[Tensor, tuple[Tensor]]:
    """k [B,T,H,K]; g, beta [B,T,H]; A [B,H,K] -> A_t after every token or A_(t-1) before it [B,T,H,K], (A,)."""
    outputs = []
    for t in range(k.shape[1]):
        previous, A = A, g[:, t, :, None].exp() * A + beta[:, t, :, None] * k[:, t].square()
        outputs.append(previous if before else A)
    return stack_time(outputs, k), (A,)


def chunked(
    k: Tensor, g: Tensor, beta: Tensor, A: Tensor, before: bool, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    chunks = Chunks(sequences, CHUNK, k.device)
    decay = HeadDecay(chunks.split(g).exp()[..., None])
    inside = decay.between @ chunks.split(beta[..., None] * k.square())
    (start,), (final,) = chunks.accumulate((A[:, :, None],), decay.across(inside), inside[:, :, -1:])
    gram = decay.carry_from_start(start) + inside
    if before:
        gram = torch.cat([start, gram[:, :, :-1]], 2)
    return chunks.merge(gram), (final[:, :, 0],)
