"""Ridge regression chunk by chunk: all tokens of all chunks are solved at once, from the states at the chunks' starts.

With D the decay inside the chunk, gain included, z what is left of the chunk's start, rows as tokens and y_c the solution
of token c (mixed with its query):
    O = z * (Y U) + (D * (Y K^T)) V          H_next = z_last H + (K D_last)^T K          U_next = z_last U + (K D_last)^T V
"""

from __future__ import annotations

from torch import Tensor

from ...framework.sequences import Chunks, Sequences
from ..decay import HeadDecay
from .iterations import solve_systems
from .system import System, ridge_and_norm, squared_norm

__all__ = ["chunked"]

CHUNK = 64


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, H: Tensor, U: Tensor, sequences: Sequences, *,
    beta: Tensor | None = None, mix: Tensor | None = None, ridge: float | Tensor, solver: str, iterations: int,
    adaptive_ridge: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    chunks = Chunks(sequences, CHUNK, v.device)
    queries, keys, values = chunks.split(q), chunks.split(k), chunks.split(v)
    decay = HeadDecay(chunks.split(g).exp()[..., None])
    weights, kept = decay.between, decay.kept_from_start
    if beta is not None:
        weights = weights * chunks.split(beta)[..., None, :]
    writes = (weights[..., -1, :, None] * keys).mT

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        left, gram, associations = parts
        return left * states[0] + gram, left * states[1] + associations

    (start, memory), (H, U) = chunks.scan(step, (H, U), decay.across(keys), writes @ keys, writes @ values)
    norm = None
    if isinstance(ridge, Tensor):
        ridge = ridge[:, None].expand(len(keys), -1, 1, -1)
    else:
        ridge, norm = ridge_and_norm(ridge, adaptive_ridge, squared_norm(start, keys, kept, weights))
    y = solve_systems(queries, System(start, keys, kept, weights, ridge), norm, solver, iterations)
    if mix is not None:
        y = queries + chunks.split(mix)[..., None] * (y - queries)
    o = kept * (y @ memory) + (weights * (y @ keys.mT)) @ values
    return chunks.merge(o), (H, U)
