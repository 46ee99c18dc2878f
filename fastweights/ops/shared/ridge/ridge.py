"""The ridge that follows the size of a key Gram matrix H_t."""

from __future__ import annotations

from torch import Tensor

__all__ = ["relative_ridge"]

SMALLEST = 1e-6  # without any key so far the answer is zero and not 0/0


def relative_ridge(factor: float, squared_norm: Tensor) -> tuple[Tensor, Tensor]:
    """(factor |H_t|_F, at least `SMALLEST`; |H_t|_F) from |H_t|_F^2. The gradient in a zero H_t is zero."""
    norm = squared_norm.clamp_min(1e-30).sqrt()
    return (factor * norm).clamp_min(SMALLEST), norm
