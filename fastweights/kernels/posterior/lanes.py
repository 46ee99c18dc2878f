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


@triton.jit
def over_eight_lanes(x, first_column):
    """The sums of x [8, 16] over its rows, one of its four columns in each lane: sums and their columns [1, 2, 2, 4]."""
    odd = tl.arange(0, 2)[None, None, :, None] > 0
    right = tl.arange(0, 2)[None, :, None, None] > 0
    even_columns, odd_columns = tl.split(tl.reshape(x, (2, 2, 2, 4, 2, 2)))
    left, right_column = tl.split(halve(even_columns, odd_columns, 2, odd[:, :, :, :, None]))
    total = tl.sum(halve(left, right_column, 1, right), 0, keep_dims=True)
    place = 2 * tl.arange(0, 2)[None, :, None, None] + tl.arange(0, 2)[None, None, :, None]
    column = first_column + place + 4 * tl.arange(0, 4)[None, None, None, :]
    return total, column
