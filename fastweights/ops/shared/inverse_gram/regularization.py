"""What keeps the inverse of a fading Gram matrix finite, whatever the decay and the keys.

The exact recursion G_t = a_t G_{t-1} + gain u u^T forgets the prior along with the tokens: in a direction that no u excites
G falls without end and its inverse grows without end (the wind-up of recursive least squares), and a decay of 0 makes G
singular at once. Two conventions, which all backends share, bound the inverse:
    strong decay: what a_t takes of the memory below 1/100, it leaves to the prior: G gains ridge (1/100 - a_t);
    wind-up: below about s = 1e-11 ridge a weight no longer counts: with A = (G + s I)^-1, G^-1 stands for
        2 A - A G A = A + s A^2, which is at most 2 / s, and G^-1 itself up to (s / weight)^2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["STRONG", "allowance", "diagonal", "inverse", "inverse_root", "missing_prior"]

STRONG = 0.01
SETTLED = 1e-11


def missing_prior(a: Tensor, ridge: float) -> Tensor:
    """The part of the prior that is added to the diagonal of G where the decay a in [0, 1] is strong."""
    return ridge * torch.relu(STRONG - a)


def allowance(G: Tensor, ridge: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """s [...] for G [..., K, K]: the smallest weight that counts, and the rounding errors of G and of an inverse that is kept in
    `dtype`."""
    eps = max(G.shape[-1] * torch.finfo(G.dtype).eps, torch.finfo(dtype).eps / 16)
    return (SETTLED * ridge + eps * G.diagonal(dim1=-2, dim2=-1).sum(-1)).detach()


def inverse_root(matrix: Tensor, s: Tensor) -> Tensor:
    """V, lower triangular, with V^T V = (matrix + s I)^-1."""
    factor, _ = torch.linalg.cholesky_ex(matrix + diagonal(s, matrix))
    identity = diagonal(torch.ones_like(s), matrix)
    return torch.linalg.solve_triangular(factor, identity, upper=False)


def inverse(matrix: Tensor, s: Tensor) -> Tensor:
    """The inverse of positive definite matrices [..., K, K] as described above; NaN where one holds a number that is not
    finite. The gradient comes from a first-order term that is zero in value."""
    fixed = matrix.detach()
    broken = ~fixed.isfinite().all(-1).all(-1)
    s = s.masked_fill(broken, 1.0)
    broken = broken[..., None, None]
    root = inverse_root(fixed.masked_fill(broken, 0.0), s)
    A = root.mT @ root
    result = A + s[..., None, None] * (A @ A)
    result = result - result @ (matrix - fixed) @ result
    return result.masked_fill(broken, math.nan)


def diagonal(x: Tensor, like: Tensor) -> Tensor:
    """x [...] times the identity of the size of like [..., K, K]."""
    return x[..., None, None] * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
