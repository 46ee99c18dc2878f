"""How a program holds a state of K slots by V numbers, the sums over it, and how it is loaded and stored.

A tile of six dimensions [LV, LK, W, RK, GV, RV]: LV x LK lanes of a warp, W warps, and RK x GV x RV numbers per thread. Slot
c = (w LK + lk) RK + rk, value channel j = (gv LV + lv) RV + rv. A sum over value channels then stays inside a warp, and one over
slots crosses the warps once. Vectors repeat over the lanes that they do not depend on, [LV, LK, W, RK, 1, 1] and
[LV, LK, W, 1, GV, RV].

Four neighbours per thread are loaded and stored as words of 64 bits, whatever their dtype: one or two instructions for four. RV
= 4, and RK is a multiple of 4. They are the numbers 4 four to 4 four + 3 of row `row` of x, whose rows have SIZE numbers. They
lie along the dimension AXIS: 3 for slots, 5 for value channels. Rows whose length is no multiple of four begin anywhere; they
are read number by number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import halve
from ..common.math import prefetch


@triton.jit
def hide_layout(x):
    """x; Triton would choose another layout for memory that it sees to be contiguous, and does not look through a shift."""
    return (x * 2) >> 1


@triton.jit
def slot_and_channel(
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr
):
    """In units of four: the slots of every thread [LV, LK, W, RK / 4, 1, 1] and its channels [LV, LK, W, 1, GV, 1]; and the
    number of the thread [LV, LK, W, 1, 1, 1]."""
    lv = tl.arange(0, LV)[:, None, None, None, None, None]
    lk = tl.arange(0, LK)[None, :, None, None, None, None]
    warp = tl.arange(0, W)[None, None, :, None, None, None]
    group = tl.arange(0, GV)[None, None, None, None, :, None]
    four = tl.arange(0, RK // 4)[None, None, None, :, None, None]
    slot = tl.broadcast_to(hide_layout((warp * LK + lk) * (RK // 4) + four), (LV, LK, W, RK // 4, 1, 1))
    channel = tl.broadcast_to(group * LV + hide_layout(lv), (LV, LK, W, 1, GV, 1))
    return slot, channel, lv + LV * (lk + LK * warp)


@triton.jit
def sum_over_warp_slots(x):
    return tl.sum(tl.sum(x, 3, keep_dims=True), 1, keep_dims=True)


@triton.jit
def is_upper_lane(AXIS: tl.constexpr):
    """Which lane of an axis of two is the upper one, for a tensor of six dimensions."""
    i = tl.arange(0, 2) > 0
    return i[None, :, None, None, None, None] if AXIS == 1 else i[None, None, :, None, None, None]


@triton.jit
def sum_to_one_channel(x):
    """The sum of x [LV, 4, W, RK, G, 4] over the slots of a warp, every lane with one of its four neighbouring channels:
    [LV, 2, 2, W, G, 1]. Lane (i, j) of the two axes of lanes has neighbour i + 2 j."""
    LV: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[2]
    G: tl.constexpr = x.shape[4]
    even, odd = tl.split(tl.reshape(tl.sum(x, 3), (LV, 2, 2, W, G, 2, 2)))
    even, odd = tl.split(halve(even, odd, 1, is_upper_lane(1)))
    return halve(tl.reshape(even, (LV, 2, 2, W, G, 1)), tl.reshape(odd, (LV, 2, 2, W, G, 1)), 2, is_upper_lane(2))


@triton.jit
def sum_over_warps(x):
    """The sum of x [LV, 2, 2, W, G, 1] over W, in every warp. What crosses shared memory is flattened with the lanes as its
    fastest dimension: Triton puts the numbers of a thread next to each other, and then all lanes meet in one bank."""
    LV: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[3]
    G: tl.constexpr = x.shape[4]
    flat = tl.reshape(tl.permute(x, (4, 0, 1, 2, 5, 3)), (G * LV * 4, W))
    total = tl.broadcast_to(tl.sum(flat, 1, keep_dims=True), flat.shape)
    return tl.permute(tl.reshape(total, (G, LV, 2, 2, 1, W)), (1, 2, 3, 5, 0, 4))


@triton.jit
def take_lane(x, lane):
    """What each lane of the first axis of x finds in `lane`: one exchange."""
    return tl.gather(x, tl.broadcast_to(lane, x.shape), 0)


@triton.jit
def sum_over_slots(x):
    """The sum of x [8, 4, W, RK, GV, 4] over slots [8, 4, W, 1, GV, 4]."""
    W: tl.constexpr = x.shape[2]
    GV: tl.constexpr = x.shape[4]
    own = tl.reshape(sum_over_warps(sum_to_one_channel(x)), (8, 4, W, GV))
    own = tl.reshape(tl.permute(own, (1, 0, 2, 3)), (32, W, GV))
    lane = (tl.arange(0, 32) % 8)[:, None, None]
    even = tl.join(take_lane(own, lane), take_lane(own, lane + 8))
    odd = tl.join(take_lane(own, lane + 16), take_lane(own, lane + 24))
    total = tl.permute(tl.reshape(tl.join(even, odd), (4, 8, W, GV, 4)), (1, 0, 2, 3, 4))
    return tl.reshape(total, (8, 4, W, 1, GV, 4))


@triton.jit
def sum_two_over_slots(x, y):
    """Two sums that cross the warps together."""
    LV: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[2]
    GV: tl.constexpr = x.shape[4]
    both = tl.permute(tl.join(tl.sum(x, 3, keep_dims=True), tl.sum(y, 3, keep_dims=True)), (0, 1, 2, 3, 6, 4, 5))
    total = sum_over_slots(tl.reshape(both, (LV, 4, W, 1, 2 * GV, 4)))
    return tl.split(tl.permute(tl.reshape(total, (LV, 4, W, 1, 2, GV, 4)), (0, 1, 2, 3, 5, 6, 4)))


@triton.jit
def sum_over_channels(x):
    total = tl.sum(tl.sum(tl.sum(x, 5, keep_dims=True), 4, keep_dims=True), 0, keep_dims=True)
    return tl.broadcast_to(total, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], 1, 1))


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
