"""Ridge regression token by token, with H_t formed, which is the specification, and chunk by chunk: all tokens of all chunks are
solved at once, from the states at the chunks' starts.

With D the decay inside the chunk, gain included, z what is left of the chunk's start, rows as tokens and y_c the solution
of token c (mixed with its query):
    O = z * (Y U) + (D * (Y K^T)) V          H_next = z_last H + (K D_last)^T K          U_next = z_last U + (K D_last)^T V

The gradient of the iterative solvers is by implicit differentiation with the same iteration,
    dq = solve(dx),   dH = -dq x^T,   d(ridge) = -dq * x,
which is that of the exact solution once the iteration has converged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...framework.call import stack_time
from ...framework.sequences import Chunks, Sequences
from ..decay import HeadDecay
from .iterations import iterate, solve_systems
from .system import System, ridge_and_norm, squared_norm

CHUNK = 64


def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, H: Tensor, U: Tensor, *, beta: Tensor | None = None,
    mix: Tensor | None = None, ridge: float | Tensor, solver: str, iterations: int, adaptive_ridge: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """q (scaled), k [B,T,H,K]; v [B,T,H,V]; g, beta, mix [B,T,H]; H [B,H,K,K]; U [B,H,K,V]; ridge a number, which multiplies
    |H_t|_F if `adaptive_ridge`, or the diagonal itself, [H,K]."""
    outputs = []
    for t in range(v.shape[1]):
        decay = g[:, t, :, None, None].exp()
        write = (k[:, t] if beta is None else beta[:, t, :, None] * k[:, t])[..., None]
        H = decay * H + write * k[:, t, :, None, :]
        U = decay * U + write * v[:, t, :, None, :]
        x = solution(H, q[:, t], ridge, adaptive_ridge, solver, iterations)
        if mix is not None:
            x = q[:, t] + mix[:, t, :, None] * (x - q[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", x, U))
    return stack_time(outputs, v), (H, U)


def solution(H: Tensor, q: Tensor, ridge: float | Tensor, adaptive: bool, solver: str, iterations: int) -> Tensor:
    norm = None
    if not isinstance(ridge, Tensor):
        ridge, norm = ridge_and_norm(ridge, adaptive, H.square().sum((-1, -2))[..., None])
    matrix = H + torch.diag_embed(ridge.expand(q.shape))
    if solver == "exact":
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return torch.cholesky_solve(q[..., None], factor)[..., 0].masked_fill(failed[..., None] > 0, torch.nan)

    def solve(b: Tensor) -> Tensor:
        return iterate(solver, lambda x: multiply(matrix.detach(), x), b, ridge.detach(), norm, iterations)

    with torch.no_grad():
        x = solve(q)
    residual = q - multiply(matrix, x)
    if residual.requires_grad:  # x answers to a change of the residual: dr = solve(dx), then dq = dr, dA = -dr x^T
        residual.register_hook(lambda dx: None if dx is None else solve(dx))
    return x + (residual - residual.detach())


def multiply(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x[..., None])[..., 0]


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
    (start, memory), (H, U) = chunks.accumulate((H, U), decay.across(keys), writes @ keys, writes @ values)
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
