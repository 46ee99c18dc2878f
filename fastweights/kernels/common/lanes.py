"""Sums over the lanes of a warp that leave each lane another result.

A sum over an axis of two lanes costs one exchange per number and gives both lanes the same. With two numbers to sum, each lane
can keep one and hand over the other: one exchange for both. The axes of lanes have to be axes of length 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partner(x, axis: tl.constexpr):
    """The number that the other lane of the axis holds."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ tl.xor_sum(bits, axis, keep_dims=True)).to(tl.float32, bitcast=True)


@triton.jit
def halve(x, y, axis: tl.constexpr, is_upper):
    """The sum of x over the axis in its lower lane, that of y in the upper one."""
    return tl.where(is_upper, y, x) + partner(tl.where(is_upper, x, y), axis)
