"""Loads and stores of four neighbours per thread as words of 64 bits, whatever their dtype: one or two instructions for four.
What will be loaded is fetched ahead.

They are the numbers 4 four to 4 four + 3 of row `row` of x, whose rows have SIZE numbers. They lie along the dimension AXIS: 3
for slots, 5 for value channels. Rows whose length is no multiple of four begin anywhere; they are read number by number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import prefetch
from .layout import hide_layout

LINE = tl.constexpr(128)  # bytes


@triton.jit
def neighbour_index(AXIS: tl.constexpr):
    i = tl.arange(0, 4)
    return i[None, None, None, :, None, None] if AXIS == 3 else i[None, None, None, None, None, :]


@triton.jit
def single_slots(four):
    """The slots of `four` [LV, LK, W, G, 1, 1], in units of four, one by one [LV, LK, W, 4 G, 1, 1]."""
    SHAPE: tl.constexpr = (four.shape[0], four.shape[1], four.shape[2], four.shape[3], 4, 1)
    each = tl.broadcast_to(four * 4, SHAPE) + tl.arange(0, 4)[None, None, None, None, :, None]
    return tl.reshape(each, (SHAPE[0], SHAPE[1], SHAPE[2], 4 * SHAPE[3], 1, 1))


@triton.jit
def load_four(x, row, four, mask, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """In the dtype of memory; 0 past the end of the row or where `mask` does not hold."""
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    i = neighbour_index(AXIS)
    if SIZE % 4 == 0:
        at, here = (row * (SIZE // 4) + four) * (BITS // 16), mask & (four < SIZE // 4)
        words = x.to(tl.pointer_type(tl.int64))
        word = tl.load(words + at, here, 0)
        if BITS == 32:
            word = tl.where(i < 2, word, tl.load(words + at + 1, here, 0))
            found = (word >> (i % 2 * 32)).to(tl.int32).to(dtype, bitcast=True)
        else:
            found = (word >> i * 16).to(tl.int16).to(dtype, bitcast=True)
    else:
        found = tl.load(x + hide_layout(row * SIZE + four * 4 + i), mask & (four * 4 + i < SIZE), 0.0)
    return found


@triton.jit
def store_four(x, row, four, values, mask, SIZE: tl.constexpr, AXIS: tl.constexpr):
    dtype: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    i, values = neighbour_index(AXIS), values.to(dtype)
    if SIZE % 4 == 0:
        at, here = (row * (SIZE // 4) + four) * (BITS // 16), mask & (four < SIZE // 4)
        words = x.to(tl.pointer_type(tl.int64))
        if BITS == 32:
            shifted = values.to(tl.uint32, bitcast=True).to(tl.int64) << (i % 2 * 32)
            tl.store(words + at, tl.sum(tl.where(i < 2, shifted, 0), AXIS, keep_dims=True), here)
            tl.store(words + at + 1, tl.sum(tl.where(i < 2, 0, shifted), AXIS, keep_dims=True), here)
        else:
            shifted = values.to(tl.uint16, bitcast=True).to(tl.int64) << i * 16
            tl.store(words + at, tl.sum(shifted, AXIS, keep_dims=True), here)
    else:
        tl.store(x + hide_layout(row * SIZE + four * 4 + i), values, mask & (four * 4 + i < SIZE))


@triton.jit
def prefetch_rows(x, row, count, apart, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Fetch into the L1 cache the rows `row`, `row + apart`, .. of WIDTH numbers, `count` of them, at most ROWS; one cache line
    per thread."""
    BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH * BYTES + LINE - 1) // LINE)
    i = tl.arange(0, ROWS * LINES)
    at = (row + tl.minimum(i // LINES, count - 1) * apart) * WIDTH + tl.minimum(i % LINES * (LINE // BYTES), WIDTH - 1)
    prefetch((x + at).to(tl.int64, bitcast=True))
