"""The solutions of ridge systems with their gradient by implicit differentiation: no iterate is kept for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .iterations import iterate
from .system import System

__all__ = ["solve_systems"]

CACHED_NUMBERS = 2**16  # of each tensor of an iteration


def solve_systems(b: Tensor, system: System, norm: Tensor | None, solver: str, iterations: int) -> Tensor:
    """x [M, heads, C, K] with system x = b. norm: |H_c|_F [M, heads, C, 1], an upper bound of the eigenvalues without the
    ridge, which all solvers but conjugate gradients and the exact one need; being no part of the solution it has no gradient."""
    return _Solve.apply(b, *system, norm, solver, iterations)


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, b: Tensor, *arguments: Any) -> Tensor:
        *tensors, norm, ctx.solver, ctx.iterations = arguments
        system = System(*tensors)
        x = torch.empty_like(b)
        for block in cache_blocks(b):
            bound = None if norm is None else norm[block]
            x[block] = solve(b[block], system.at(block), bound, ctx.solver, ctx.iterations)
        ctx.save_for_backward(x, norm, *system)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        """db = A^-1 dx by the same solver; then the gradient of A is -db x^T."""
        x, norm, *tensors = ctx.saved_tensors
        system = System(*tensors)
        db = solve_systems(dx, system, norm, ctx.solver, ctx.iterations)
        gradients = [torch.empty_like(tensor) for tensor in system]
        for block in cache_blocks(x):
            for whole, part in zip(gradients, system.at(block).adjoint(x[block], -db[block])):
                whole[block] = part
        return db, *gradients, None, None, None


def solve(b: Tensor, system: System, norm: Tensor | None, solver: str, iterations: int) -> Tensor:
    if solver == "exact":
        return system.factorize_and_solve(b)
    return iterate(solver, system.multiply, b, system.ridge, norm, iterations)


def cache_blocks(x: Tensor) -> list[slice]:
    """Slices of the chunks. An iteration passes over all of its chunks' tensors: on a processor these should be few enough
    to stay in its cache from one iteration to the next, on a GPU many enough to fill it."""
    rows = max(1, len(x) if x.is_cuda else CACHED_NUMBERS // max(1, x[:1].numel()))
    return [slice(first, first + rows) for first in range(0, len(x), rows)]
