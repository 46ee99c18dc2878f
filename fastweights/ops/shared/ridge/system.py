"""The ridge systems of all tokens of a chunk, without forming any of their matrices.

With H the state at the chunk's start, z_c what is left of it at token c, W_cj what is left at token c of the write at
token j (gain included; 0 for j > c):
    H_c = z_c H + sum_j W_cj k_j k_j^T          (H_c + Diag(ridge_c)) x_c = b_c
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["System", "ridge_and_norm", "squared_norm"]

SMALLEST = 1e-6  # the ridge without any key so far: the answer is then zero and not 0/0


class System(NamedTuple):
    """M chunks of C tokens."""

    start: Tensor  # H [M, heads, K, K]
    keys: Tensor  # k [M, heads, C, K]
    kept: Tensor  # z [M, heads, C, 1]
    weights: Tensor  # W [M, heads, C, C]
    ridge: Tensor  # [M, heads, C, 1] or [M, heads, 1, K]

    def take(self, chunks: slice) -> System:
        return System(*(x[chunks] for x in self))

    def multiply(self, x: Tensor) -> Tensor:
        """(H_c + Diag(ridge_c)) x_c for every token, x [M, heads, C, K]."""
        inside = (self.weights * (x @ self.keys.mT)) @ self.keys
        return torch.addcmul(torch.addcmul(inside, self.kept, x @ self.start), self.ridge, x)

    def adjoint(self, x: Tensor, y: Tensor) -> System:
        """The gradient of sum_c y_c . multiply(x)_c in the system."""
        x_scores, y_scores = x @ self.keys.mT, y @ self.keys.mT
        return System(
            start=(self.kept * x).mT @ y,
            keys=(self.weights * x_scores).mT @ y + (self.weights * y_scores).mT @ x,
            kept=((x @ self.start) * y).sum(-1, keepdim=True),
            weights=x_scores * y_scores,
            ridge=(x * y).sum_to_size(self.ridge.shape),
        )

    def factorize_and_solve(self, b: Tensor) -> Tensor:
        """By Cholesky factors, the c-th token of every chunk at a time: as many matrices at once as there are chunks. NaN
        where a matrix is not positive definite."""
        solutions = []
        for c in range(b.shape[2]):
            keys = self.keys[:, :, : c + 1]
            matrix = self.kept[:, :, c, :, None] * self.start + (self.weights[:, :, c, : c + 1, None] * keys).mT @ keys
            matrix = matrix + torch.diag_embed(self.ridge.expand(b.shape)[:, :, c])
            factor, failed = torch.linalg.cholesky_ex(matrix)
            x = torch.cholesky_solve(b[:, :, c, :, None], factor)[..., 0]
            solutions.append(x.masked_fill(failed[..., None] > 0, torch.nan))
        return torch.stack(solutions, 2)


def squared_norm(start: Tensor, keys: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
    """|H_c|_F^2 of every token [M, heads, C, 1]:
    z_c^2 |H|^2 + 2 z_c sum_j W_cj k_j^T H k_j + sum_jl W_cj (k_j . k_l)^2 W_cl."""
    outside = start.square().sum((-1, -2))[..., None, None]
    across = weights @ ((keys @ start) * keys).sum(-1, keepdim=True)
    inside = (weights @ (keys @ keys.mT).square() * weights).sum(-1, keepdim=True)
    return kept.square() * outside + 2 * kept * across + inside


def ridge_and_norm(ridge: float, adaptive: bool, squared_norm: Tensor) -> tuple[Tensor, Tensor]:
    """(lambda_t, |H_t|_F) from |H_t|_F^2. lambda_t is ridge |H_t|_F, at least `SMALLEST`, or without `adaptive` the ridge itself.
    The gradient in a zero H_t is zero."""
    norm = squared_norm.clamp_min(1e-30).sqrt()
    return (ridge * norm).clamp_min(SMALLEST) if adaptive else torch.full_like(norm, ridge), norm
