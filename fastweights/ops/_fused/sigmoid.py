"""The sigmoid of the kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["sigmoid"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), the division by way of a square root, which takes fewer instructions."""
    root = tl.rsqrt(1 + tl.exp2(-LOG2E * x))
    return root * root
