"""Iterative solvers of A x = b for symmetric positive definite A known only by its products.

Every vector is a row (the last dimension) with a matrix of its own; `apply` multiplies all of them by theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["chebyshev", "chebyshev_weights", "conjugate_gradient", "iterate"]

Apply = Callable[[Tensor], Tensor]


def iterate(solver: str, apply: Apply, b: Tensor, ridge: Tensor, norm: Tensor | None, iterations: int) -> Tensor:
    """x ~ A^-1 b with A = H + ridge I; `norm` bounds the eigenvalues of H, which the Chebyshev iteration needs."""
    if solver == "chebyshev":
        assert norm is not None
        return chebyshev(apply, b, ridge, ridge + norm, iterations)
    return conjugate_gradient(apply, b, iterations)


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
