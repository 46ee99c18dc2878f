"""The sigmoid of the kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .math import LOG2E

__all__ = ["sigmoid"]


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), the division by way of a square root, which takes fewer instructions."""
    root = tl.rsqrt(1 + tl.exp2(-LOG2E * x))
    return root * root
