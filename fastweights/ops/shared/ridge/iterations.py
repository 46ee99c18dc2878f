"""Iterative solvers of A x = b for symmetric positive definite A known only by its products, and the solutions of ridge systems
with their gradient by implicit differentiation: no iterate is kept for it.

Every vector is a row (the last dimension) with a matrix of its own; `apply` multiplies all of them by theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .system import System

__all__ = ["SOLVERS", "chebyshev", "chebyshev_weights", "conjugate_gradient", "iterate", "solve_systems"]

Apply = Callable[[Tensor], Tensor]


def iterate(solver: str, apply: Apply, b: Tensor, ridge: Tensor, norm: Tensor | None, iterations: int) -> Tensor:
    """x ~ A^-1 b with A = H + ridge I; `norm` bounds the eigenvalues of H, which all but conjugate gradients need."""
    if solver == "conjugate_gradient":
        return conjugate_gradient(apply, b, iterations)
    assert norm is not None
    return WITHIN_BOUNDS[solver](apply, b, ridge, ridge + norm, iterations)


def chebyshev(apply: Apply, b: Tensor, low: Tensor, high: Tensor, iterations: int) -> Tensor:
    """Chebyshev iteration for eigenvalues in [low, high] (Gated KalmaNet, Algorithm 1). The result is a polynomial of A
    times b: linear in b, with a symmetric matrix."""
    step = 2 / (high + low)
    previous, x = torch.zeros_like(b), step * b
    for weight in chebyshev_weights((high - low) / (high + low), iterations):
        gained = torch.addcmul(x - previous, step, apply(x) - b, value=-1)
        x, previous = torch.addcmul(previous, weight, gained), x
    return x


def chebyshev_weights(contraction: Tensor, iterations: int) -> Iterator[Tensor]:
    """omega_1, omega_2, ... from omega_0 = 2 (the paper's Appendix B; its Algorithm 1 prints 0) and
    rho = (high - low) / (high + low)."""
    weight, square = torch.full_like(contraction, 2.0), contraction.square()
    for _ in range(iterations):
        weight = 4 / (4 - square * weight)
        yield weight


def gradient_descent(apply: Apply, b: Tensor, low: Tensor, high: Tensor, iterations: int) -> Tensor:
    """Gradient descent on x.Ax / 2 - b.x with the step that is best for eigenvalues in [low, high]. It starts as the Chebyshev
    iteration does, with one step from zero, and is a polynomial of A times b too."""
    step = 2 / (high + low)
    x = step * b
    for _ in range(iterations):
        x = torch.addcmul(x, step, apply(x) - b, value=-1)
    return x


def accelerated_gradient_descent(apply: Apply, b: Tensor, low: Tensor, high: Tensor, iterations: int) -> Tensor:
    """Nesterov's method with the step and the momentum that are best for quadratic functions (Lessard, Recht and Packard 2016,
    table 1). It starts with one step from zero and is a polynomial of A times b too."""
    step, root = 4 / (3 * high + low), (3 * high / low + 1).sqrt()
    momentum = (root - 2) / (root + 2)
    previous, x = torch.zeros_like(b), step * b
    for _ in range(iterations):
        ahead = torch.addcmul(x, momentum, x - previous)
        x, previous = torch.addcmul(ahead, step, apply(ahead) - b, value=-1), x
    return x


def conjugate_gradient(apply: Apply, b: Tensor, iterations: int) -> Tensor:
    """Conjugate gradients from zero. b is brought to size 1 first, so that squares of small gradients do not underflow;
    what is solved already (a zero residual) stays as it is."""
    smallest = torch.finfo(b.dtype).tiny
    size = b.abs().amax(-1, keepdim=True).clamp_min(smallest)
    x, residual = torch.zeros_like(b), b / size
    direction, energy = residual, _dot(residual, residual)
    for _ in range(iterations):
        image = apply(direction)
        step = energy / _dot(direction, image).abs().clamp_min(smallest)  # negative only by rounding
        x = torch.addcmul(x, step, direction)
        residual = torch.addcmul(residual, step, image, value=-1)
        left = _dot(residual, residual)
        direction = torch.addcmul(residual, left / energy.clamp_min(smallest), direction)
        energy = left
    return size * x


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


WITHIN_BOUNDS = {
    "chebyshev": chebyshev,
    "gradient_descent": gradient_descent,
    "accelerated_gradient_descent": accelerated_gradient_descent,
}
SOLVERS = ("chebyshev", "conjugate_gradient", "exact", "gradient_descent", "accelerated_gradient_descent")


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
            x[block] = solve(b[block], system.take(block), bound, ctx.solver, ctx.iterations)
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
            for whole, part in zip(gradients, system.take(block).adjoint(x[block], -db[block])):
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
