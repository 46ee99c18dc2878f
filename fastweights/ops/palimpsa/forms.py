"""Palimpsa token by token, which is the specification, and chunk by chunk, exact.

M and J are two linear-attention memories (keys k and k^2), whose states at the start of every chunk are matrix products and a
decayed sum. Only the elementwise division is left to the inside of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from ..shared.decay import HeadDecay
from .inside import ReadInside

CHUNK = 64
SUB_CHUNK = 8


def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, M: Tensor, J: Tensor, *, prior: Tensor, variance: bool
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """q (scaled), k [B,T,H,K]; v, beta [B,T,H,V]; g [B,T,H]; M, J [B,H,K,V]; prior [H] -> o, or (o, variance) where
    `variance`, and (M, J)."""
    means, variances = [], []
    for t in range(v.shape[1]):
        decay = g[:, t].exp()[..., None, None]
        M = decay * M + k[:, t, :, :, None] * v[:, t, :, None, :]
        J = decay * J + k[:, t, :, :, None].square() * beta[:, t, :, None, :]
        importance = J + prior[:, None, None]
        means.append(torch.einsum("bhk,bhkv->bhv", q[:, t], M / importance))
        if variance:
            variances.append(torch.einsum("bhk,bhkv->bhv", q[:, t].square(), 1 / importance))
    o = stack_time(means, v)
    return ((o, stack_time(variances, v)) if variance else o), (M, J)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, M: Tensor, J: Tensor,
    sequences: Sequences, *, prior: Tensor, variance: bool,
) -> tuple[Any, tuple[Tensor, Tensor]]:  # fmt: skip
    """q (scaled), k [B,T,H,K]; v, beta [B,T,H,V]; g [B,T,H]; M, J [N,H,K,V]; prior [H] -> o, or (o, variance) where
    `variance`, and (M, J)."""
    chunks = Chunks(sequences, CHUNK, v.device)
    c = min(SUB_CHUNK, chunks.size)
    Q, K, V, B, G = (chunks.split(x).unflatten(2, (-1, c)) for x in (q, k, v, beta, g))
    tokens, subs = tabulate_decays(G.exp())

    keys = (K * (tokens[..., -1, 1:] * subs[..., -1, 1:, None])[..., None]).flatten(2, 3)
    written_M, written_J = keys.mT @ V.flatten(2, 3), (keys * K.flatten(2, 3)).mT @ B.flatten(2, 3)
    starts, (M, J) = chunks.accumulate((M, J), subs[..., -1, :1, None], written_M, written_J)
    rows = (Q, K, V, B, tokens[..., 1:, :], subs[..., :-1, :-1], prior.expand(Q.shape[:2]), *starts)
    o, w = (
        chunks.merge(x.reshape(*Q.shape[:2], chunks.size, x.shape[-1]))
        for x in ReadInside.apply(variance, *(x.flatten(0, 1) for x in rows))
    )
    return ((o, w) if variance else o), (M, J)


def tabulate_decays(a: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (see `tabulate`) of the decays a [M, H, s, c] of s sub-chunks of c tokens: one per sub-chunk, token by token
    [M, H, s, 1+c, 1+c], and one per chunk, sub-chunk by sub-chunk [M, H, 1+s, 1+s]."""
    tokens = tabulate(a.flatten(1, 2)).unflatten(1, a.shape[1:3])
    return tokens, tabulate(tokens[..., -1, 0])


def tabulate(a: Tensor) -> Tensor:
    """A table [M, H, 1+n, 1+n] of n steps with the decays a [M, H, n]. Entry [i, j] is the fraction of write j that is left after
    step i, and 0 where write j comes later. Write 0 is the state before the first step."""
    decay = HeadDecay(a[..., None])
    later = torch.cat([decay.kept_from_start, decay.between], -1)
    first = F.pad(torch.ones_like(later[:, :, :1, :1]), (0, a.shape[-1]))
    return torch.cat([first, later], 2)
