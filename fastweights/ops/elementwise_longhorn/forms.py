"""Elementwise Longhorn token by token, which is the specification, and chunk by chunk, exact.

By chunks, all chunks are read at once, token after token: first from a memory of zeros and from one of ones, which tells what a
chunk writes and what it keeps of its start, then from their starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from .inside import ReadInside

CHUNK = 64


def reference(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled), k [B,T,H,K]; v, beta [B,T,H,V]; S [B,H,K,V] -> o [B,T,H,V], (S,)."""
    outputs = []
    for t in range(v.shape[1]):
        square = k[:, t].square()
        gain = beta[:, t] / (1 + beta[:, t] * square.sum(-1, keepdim=True))
        kept = 1 - square[..., None] * gain[:, :, None]
        S = kept * S + k[:, t, :, :, None] * (gain * v[:, t])[:, :, None]
        outputs.append((q[:, t, :, None] @ S)[:, :, 0])
    return stack_time(outputs, v), (S,)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled), k [B,T,H,K]; v, beta [B,T,H,V]; S [N,H,K,V] -> o [B,T,H,V], (S,)."""
    chunks = Chunks(sequences, CHUNK, v.device)
    Q, K, V, B = (chunks.split(x) for x in (q, k, v, beta))
    square = K.square()
    length = square.sum(-1, keepdim=True)
    # 1 - k^2 e = least + others e without cancellation, for others = |k|^2 - k^2 and least = 1 / (1 + beta |k|^2).
    least = 1 / (1 + B * length)
    gain = B * least
    of_chunks = (Q, K, gain * V, least, (length - square).clamp_min(0), gain)
    queries, keys, values, *decay = (x.flatten(0, 1).transpose(0, 1).contiguous() for x in of_chunks)

    shape = (*Q.shape[:2], K.shape[3], V.shape[3])
    zeros = K.new_zeros(shape).flatten(0, 1)
    _, written = ReadInside.apply(False, queries, keys, values, *decay, zeros)
    _, kept = ReadInside.apply(False, queries, keys, torch.zeros_like(values), *decay, torch.ones_like(zeros))
    (start,), (final,) = chunks.accumulate((S,), kept.view(shape), written.view(shape))
    o, _ = ReadInside.apply(True, queries, keys, values, *decay, start.flatten(0, 1))
    return chunks.merge(o.transpose(0, 1).view_as(V)), (final,)
