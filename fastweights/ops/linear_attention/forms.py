"""Linear attention token by token, which is the specification, and chunk by chunk: matrix products inside a chunk, one decayed
sum across chunks.

With D the decay inside the chunk, S the state at its start (rows are tokens):
    O = Q exp(G) S + (D * Q K^T) V        S_next = exp(G_last) S + (K exp(G_last - G))^T V
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from ..shared.decay import make_decay

CHUNK = 64


def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled), k [B,T,H,K]; v [B,T,H,V]; g None, [B,T,H] or [B,T,H,K]; S [B,H,K,V]."""
    outputs = []
    for t in range(v.shape[1]):
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if g.ndim == 3 else decay[..., None])
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v), (S,)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    chunks = Chunks(sequences, CHUNK, v.device)
    Q, K, V = chunks.split(q), chunks.split(k), chunks.split(v)
    decay = make_decay(None if g is None else chunks.split(g), len(V))
    (scores,) = decay.scores(K, Q)
    (start,), (final,) = chunks.accumulate((S,), decay.across(V), decay.carry_to_end(K).mT @ V)
    return chunks.merge(decay.carry_from_start(Q) @ start + scores @ V), (final,)
