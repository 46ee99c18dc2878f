"""The delta rule token by token, which is the specification, and chunk by chunk, exact: one triangular solve gives the corrected
values of all tokens of a chunk.

With rows as tokens, W the write keys, G the summed log decay, S the state at the chunk's start:
    (I + diag(beta) tril(K exp(G) (W exp(-G))^T, -1)) U = diag(beta) (V - K exp(G) S)
    O = Q exp(G) S + tril(Q exp(G) (W exp(-G))^T) U        S_next = exp(G_last) S + (W exp(G_last - G))^T U
The solve is linear in S, so it is done for all chunks at once and only two products per chunk remain in sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from ..shared.decay import make_decay

CHUNK = 64


def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write_key: Tensor | None, S: Tensor
) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled), k, write_key [B,T,H,K]; v [B,T,H,V]; beta [B,T,H]; g None, [B,T,H] or [B,T,H,K]; S [B,H,K,V]."""
    write_key = k if write_key is None else write_key
    outputs = []
    for t in range(v.shape[1]):
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if g.ndim == 3 else decay[..., None])
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + write_key[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v), (S,)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write_key: Tensor | None, S: Tensor,
    sequences: Sequences,
) -> tuple[Tensor, tuple[Tensor]]:  # fmt: skip
    chunks = Chunks(sequences, CHUNK, v.device)
    Q, K, V, gain = chunks.split(q), chunks.split(k), chunks.split(v), chunks.split(beta)[..., None]
    W = K if write_key is None else chunks.split(write_key)
    decay = make_decay(None if g is None else chunks.split(g), len(V))

    overlap, scores = decay.scores(W, K, Q)
    both = torch.linalg.solve_triangular(
        gain * overlap, gain * torch.cat([V, decay.carry_from_start(K)], -1), upper=False, unitriangular=True
    )
    from_values, from_state = both.split([V.shape[-1], K.shape[-1]], -1)
    corrected: list[Tensor] = []

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept, values, reads, writes = parts
        corrected.append(values - reads @ states[0])
        return (kept * states[0] + writes @ corrected[-1],)

    (start,), (final,) = chunks.scan(step, (S,), decay.across(V), from_values, from_state, decay.carry_to_end(W).mT)
    U = torch.cat(corrected) if corrected else from_values
    return chunks.merge(decay.carry_from_start(Q) @ start + scores @ U), (final,)
