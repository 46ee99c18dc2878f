"""The solutions of Gated KalmaNet for automatic differentiation: every H_t is formed and every iterate is kept.

A twin for comparison with `fastweights.ops.gated_kalmanet`, whose backward is by implicit differentiation. It takes memory for
T K^2 numbers per head and iteration.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["unrolled_solutions"]


def unrolled_solutions(
    q: Tensor, k: Tensor, g: Tensor, *, solver: str = "chebyshev", iterations: int = 30, ridge: float = 0.02,
    adaptive_ridge: bool = True,
) -> Tensor:  # fmt: skip
    """x_t ~ (H_t + lambda_t I)^-1 q_t [B, T, H, K] of q, k [B, T, H, K] and the log decay g [B, T, H], from H_0 = 0.

    The bounds of the eigenvalues are constants, as they are no part of what is solved. solver: one of the iterative solvers of
    `gated_kalmanet`; the Chebyshev iteration is Algorithm 1 of the paper as printed but for omega_0 = 2.
    """
    H, every = torch.zeros((), dtype=q.dtype, device=q.device), []
    for t in range(q.shape[1]):
        H = g[:, t, :, None, None].exp() * H + k[:, t, :, :, None] * k[:, t, :, None, :]
        every.append(H)
    H = torch.stack(every, 1)
    norm = torch.linalg.matrix_norm(H)[..., None]
    size = ridge * norm if adaptive_ridge else torch.full_like(norm, ridge)
    A = H + size[..., None] * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    low, high = size.detach(), (size + norm).detach()
    if solver == "conjugate_gradient":
        return _conjugate_gradient(A, q, iterations)
    before, x = torch.zeros_like(q), 2 / (low + high) * q
    rho, omega = (high - low) / (high + low), torch.full_like(norm, 2.0)
    if solver == "accelerated_gradient_descent":
        before, x = torch.zeros_like(q), 4 / (3 * high + low) * q
    for _ in range(iterations):
        if solver == "chebyshev":
            omega = 4 / (4 - rho**2 * omega)
            new = x - 2 * omega / (high + low) * (_times(A, x) - q) + (omega - 1) * (x - before)
        elif solver == "gradient_descent":
            new = x - 2 / (high + low) * (_times(A, x) - q)
        else:
            root = (3 * high / low + 1).sqrt()
            y = x + (root - 2) / (root + 2) * (x - before)
            new = y - 4 / (3 * high + low) * (_times(A, y) - q)
        before, x = x, new
    return x


def _conjugate_gradient(A: Tensor, q: Tensor, iterations: int) -> Tensor:
    x, residual, direction = torch.zeros_like(q), q, q
    for _ in range(iterations):
        image, energy = _times(A, direction), residual.square().sum(-1, keepdim=True)
        step = energy / (direction * image).sum(-1, keepdim=True)
        x, residual = x + step * direction, residual - step * image
        direction = residual + residual.square().sum(-1, keepdim=True) / energy * direction
    return x


def _times(A: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bthij,bthj->bthi", A, x)
