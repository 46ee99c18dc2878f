"""Linear attention chunk by chunk: matrix products inside a chunk, one decayed sum across chunks.

With D the decay inside the chunk, S the state at its start (rows are tokens):
    O = Q exp(G) S + (D * Q K^T) V        S_next = exp(G_last) S + (K exp(G_last - G))^T V
"""

from __future__ import annotations

from torch import Tensor

from ..framework.sequences import Chunks, Sequences
from ..shared.decay import make_decay

CHUNK = 64


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    chunks = Chunks(sequences, CHUNK, v.device)
    Q, K, V = chunks.split(q), chunks.split(k), chunks.split(v)
    decay = make_decay(None if g is None else chunks.split(g), len(V))
    (scores,) = decay.scores(K, Q)

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept, written = parts
        return (kept * states[0] + written,)

    (start,), (final,) = chunks.scan(step, (S,), decay.across(V), decay.carry_to_end(K).mT @ V)
    return chunks.merge(decay.carry_from_start(Q) @ start + scores @ V), (final,)
