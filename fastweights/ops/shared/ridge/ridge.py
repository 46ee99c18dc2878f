"""The ridge on a key Gram matrix H_t, which follows its size or stays the same, and the size itself."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ridge_and_norm"]

SMALLEST = 1e-6  # without any key so far the answer is zero and not 0/0


def ridge_and_norm(ridge: float, adaptive: bool, squared_norm: Tensor) -> tuple[Tensor, Tensor]:
    """(lambda_t, |H_t|_F) from |H_t|_F^2. lambda_t is ridge |H_t|_F, at least `SMALLEST`, or without `adaptive` the ridge itself.
    The gradient in a zero H_t is zero."""
    norm = squared_norm.clamp_min(1e-30).sqrt()
    return (ridge * norm).clamp_min(SMALLEST) if adaptive else torch.full_like(norm, ridge), norm
