"""Output-normalised test-time training chunk by chunk, exact.

A token writes gamma_t k_t u_t^T, where u_t depends on the memory's answer z_t alone. With S the memory at the chunk's start,
    z_t = S^T k_t + sum_{j < t} gamma_j (k_j.k_t) u_j
so that only vectors of the size of a value follow each other; all that touches the K x V memory is matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.sequences import Chunks, Sequences
from .writes import Writes

CHUNK = 64


def chunked(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, S: Tensor, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    chunks = Chunks(sequences, CHUNK, v.device)
    Q, K, V, gain = chunks.split(q), chunks.split(k), chunks.split(v), chunks.split(gamma)[..., None]
    keys = gain * K
    written: list[Tensor] = []

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        K, V, keys, overlap = parts
        written.append(Writes.apply(K @ states[0], overlap, V))
        return (states[0] + keys.mT @ written[-1],)

    (start,), (final,) = chunks.scan(step, (S,), K, V, keys, (K @ keys.mT).tril(-1))
    U = torch.cat(written) if written else V
    return chunks.merge(Q @ start + (Q @ keys.mT).tril() @ U), (final,)
