"""The delta rule with erase directions of its own, token by token, which is the specification, and chunk by chunk, exact: a WY
transform with two directions that are written.

With rows as tokens, G the summed log decay, G' that of the token before, S the state at the chunk's start, U what a finds:
    (I - tril(A exp(G') (B exp(-G))^T, -1)) U = A exp(G') S + tril(A exp(G') (K exp(-G))^T, -1) V
    O = Q exp(G) S + tril(Q exp(G) (B exp(-G))^T) U + tril(Q exp(G) (K exp(-G))^T) V
    S_next = exp(G_last) S + (B exp(G_last - G))^T U + (K exp(G_last - G))^T V
What row i of A reads is what row i - 1 would read: `decay` gets A one row earlier, and its results move one row down. So all
factors are products of decays, never quotients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from ..shared.decay import make_decay

CHUNK = 64


def reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None, S: Tensor
) -> tuple[Tensor, tuple[Tensor]]:
    """q (scaled), k, a, b [B,T,H,K]; v [B,T,H,V]; g None, [B,T,H] or [B,T,H,K]; S [B,H,K,V]."""
    outputs = []
    for t in range(v.shape[1]):
        answer = torch.einsum("bhk,bhkv->bhv", a[:, t], S)
        if g is not None:
            decay = g[:, t].exp()
            S = S * (decay[..., None, None] if g.ndim == 3 else decay[..., None])
        S = S + b[:, t, :, :, None] * answer[:, :, None, :] + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v), (S,)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None, S: Tensor, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    chunks = Chunks(sequences, CHUNK, v.device)
    Q, K, V, A, B = (chunks.split(x) for x in (q, k, v, a, b))
    decay = make_decay(None if g is None else chunks.split(g), len(V))
    earlier = F.pad(A[:, :, 1:], (0, 0, 0, 1))

    found_in_b, read_in_b = decay.scores(B, earlier, Q)
    found_in_k, read_in_k = decay.scores(K, earlier, Q)
    reads = torch.cat([A[:, :, :1], decay.carry_from_start(earlier)[:, :, :-1]], 2)
    both = torch.linalg.solve_triangular(
        -move_down(found_in_b), torch.cat([move_down(found_in_k) @ V, reads], -1), upper=False, unitriangular=True
    )
    from_values, from_state = both.split([V.shape[-1], K.shape[-1]], -1)
    found: list[Tensor] = []

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept, values, reads, writes, written = parts
        found.append(values + reads @ states[0])
        return (kept * states[0] + writes @ found[-1] + written,)

    (start,), (final,) = chunks.scan(
        step, (S,), decay.across(V), from_values, from_state, decay.carry_to_end(B).mT, decay.carry_to_end(K).mT @ V
    )
    U = torch.cat(found) if found else from_values
    return chunks.merge(decay.carry_from_start(Q) @ start + read_in_b @ U + read_in_k @ V), (final,)


def move_down(x: Tensor) -> Tensor:
    """Every row of [.., C, C] in the place of the next one; the first is 0."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0))
