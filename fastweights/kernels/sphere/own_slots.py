"""A slot of its own for every lane: how the kernels of the decode objective sum over value channels.

A tile is [8, LK, W, RK, GV, 4], as in layout.py: eight lanes share the channels of RK slots, 4 or 8. Where every lane keeps the
sum of one slot (of four slots two lanes have the same one), a sum over channels takes few exchanges, and what follows from it
is computed once per slot. `spread_to_tile` gives results back to all eight lanes.

A vector with a slot for every lane is [8, LK, W]. Of the bits of a slot's place among its eight or four, lanes have the lowest as
their highest: in this order the exchanges leave the numbers of a thread in their places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import halve
from .forward import inverse_square
from .layout import hide_layout, take_lane


@triton.jit
def own_slot(LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr):
    """The slot of every lane, and which of the lanes with this slot it is."""
    lv, lk, warp = tl.arange(0, 8)[:, None, None], tl.arange(0, LK)[None, :, None], tl.arange(0, W)[None, None, :]
    last = lv % 2
    slot = hide_layout((warp * LK + lk) * RK + lv // 2 % 2 * 2 + lv // 4 + last * (RK - 4))
    return slot, (last if RK == 4 else 0) + 0 * slot


@triton.jit
def keep_one_of_two(x):
    """From x [P, Q, LK, W, R] one with half the slots per lane, [2 P, Q / 2, LK, W, R / 2]."""
    P: tl.constexpr = x.shape[0]
    Q: tl.constexpr = x.shape[1]
    LK: tl.constexpr = x.shape[2]
    W: tl.constexpr = x.shape[3]
    R: tl.constexpr = x.shape[4]
    even, odd = tl.split(tl.reshape(x, (P, 2, Q // 2, LK, W, R // 2, 2)))
    is_upper = (tl.arange(0, 2) > 0)[None, :, None, None, None, None]
    return tl.reshape(halve(even, odd, 1, is_upper), (2 * P, Q // 2, LK, W, R // 2))


@triton.jit
def sum_in_threads(x):
    """The sums of x [8, LK, W, R, GV, RV] over the channels of a thread [8, LK, W, R]. One after the other: products fuse with
    that."""
    return tl.sum(tl.reshape(x, (8, x.shape[1], x.shape[2], x.shape[3], x.shape[4] * x.shape[5])), 4)


@triton.jit
def sum_own_over_channels(x):
    """The sums of x [8, LK, W, RK, GV, RV] over channels, one slot per lane."""
    RK: tl.constexpr = x.shape[3]
    own = keep_one_of_two(keep_one_of_two(tl.reshape(sum_in_threads(x), (1, 8, x.shape[1], x.shape[2], RK))))
    own = tl.broadcast_to(tl.sum(own, 1, keep_dims=True), own.shape) if RK == 4 else keep_one_of_two(own)
    return tl.reshape(own, (8, x.shape[1], x.shape[2]))


@triton.jit
def take_two_lanes(x, lane: tl.constexpr, other: tl.constexpr):
    """The numbers of two lanes of eight, in all of them: from x [8, LK, W] [8, LK, W, 2]."""
    return tl.join(take_lane(x, tl.full((1, 1, 1), lane, tl.int32)), take_lane(x, tl.full((1, 1, 1), other, tl.int32)))


@triton.jit
def spread_to_tile(x, RK: tl.constexpr):
    """x [8, LK, W] as [8, LK, W, RK, 1, 1]."""
    if RK == 4:
        even, odd = take_two_lanes(x, 0, 2), take_two_lanes(x, 4, 6)
    else:
        even = tl.join(take_two_lanes(x, 0, 1), take_two_lanes(x, 2, 3))
        odd = tl.join(take_two_lanes(x, 4, 5), take_two_lanes(x, 6, 7))
    return tl.reshape(tl.join(even, odd), (8, x.shape[1], x.shape[2], RK, 1, 1))


@triton.jit
def dot_over_channels(x, y):
    """x.y of vectors [8, LK, W, 1, GV, RV], in every lane [8, LK, W]."""
    of_thread = tl.reshape(sum_in_threads(x * y), (8, x.shape[1], x.shape[2]))
    return tl.broadcast_to(tl.sum(of_thread, 0, keep_dims=True), of_thread.shape)


@triton.jit
def sum_over_four_slots(x):
    """The sum of x [8, LK, W] over the slots of eight lanes that share four. The two lanes of a slot may have numbers, and
    sums, of their own."""
    slots = tl.reshape(x, (4, 2, x.shape[1], x.shape[2]))
    return tl.reshape(tl.broadcast_to(tl.sum(slots, 0, keep_dims=True), slots.shape), x.shape)


@triton.jit
def load_own(x, slot, mask, K: tl.constexpr):
    return tl.load(x + slot, mask & (slot < K), 0.0)


@triton.jit
def store_own(x, slot, values, mask, K: tl.constexpr):
    tl.store(x + slot, values.to(x.dtype.element_ty), mask & (slot < K))


@triton.jit
def load_own_start(start, length, own, K: tl.constexpr, V: tl.constexpr):
    """Of the initial slots 1 / n^2, and whether there is a slot (1 or 0), one slot per lane."""
    if start is None:
        alive = tl.where(own < min(K, V), 1.0, 0.0)
        return alive, alive
    per_square = inverse_square(sum_own_over_channels(length) / 8)  # all eight lanes have the length
    return per_square, tl.where(per_square > 0, 1.0, 0.0)
