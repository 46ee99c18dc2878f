"""One slot per lane: how the kernels of the decode objective sum over value channels.

A tile is [8, LK, W, 4, GV, RV], as in layout.py: eight lanes share the channels of four slots. Where every lane keeps the sum of
one slot (two lanes the same one), a sum over channels takes 4 exchanges in place of 12, and what follows from it is computed
for one slot in place of four. `to_tile` gives results back to all eight lanes.

A vector of one slot per lane is [8, LK, W]: lanes 0 to 7 have the slots 0, 0, 2, 2, 1, 1, 3, 3 of their four. In this order the
exchanges leave the numbers of a thread in their places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..posterior.lanes import halve, partner
from .forward import inverse_square
from .layout import hidden


@triton.jit
def own_slot(LK: tl.constexpr, W: tl.constexpr):
    """The slot of every lane, and which of the two lanes with this slot it is."""
    lv, lk, warp = tl.arange(0, 8)[:, None, None], tl.arange(0, LK)[None, :, None], tl.arange(0, W)[None, None, :]
    slot = hidden((warp * LK + lk) * 4 + lv // 2 % 2 * 2 + lv // 4)
    return slot, (lv + 0 * slot) % 2


@triton.jit
def one_of_two(x):
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
def two_from_one(x):
    """The way back: from x [P, Q, LK, W, R] one with twice the slots per lane."""
    P: tl.constexpr = x.shape[0]
    Q: tl.constexpr = x.shape[1]
    LK: tl.constexpr = x.shape[2]
    W: tl.constexpr = x.shape[3]
    R: tl.constexpr = x.shape[4]
    mine = tl.reshape(x, (P // 2, 2, Q, LK, W, R))
    other = partner(mine, 1)
    is_upper = (tl.arange(0, 2) > 0)[None, :, None, None, None, None]
    pairs = tl.join(tl.where(is_upper, other, mine), tl.where(is_upper, mine, other))
    return tl.reshape(pairs, (P // 2, 2 * Q, LK, W, 2 * R))


@triton.jit
def own_over_channels(x):
    """The sums of x [8, LK, W, 4, GV, RV] over channels, one slot per lane."""
    of_thread = tl.reshape(tl.sum(tl.sum(x, 5), 4), (1, 8, x.shape[1], x.shape[2], 4))
    own = one_of_two(one_of_two(of_thread))
    own = tl.broadcast_to(tl.sum(own, 1, keep_dims=True), own.shape)
    return tl.reshape(own, (8, x.shape[1], x.shape[2]))


@triton.jit
def to_tile(x):
    """x [8, LK, W] as [8, LK, W, 4, 1, 1]."""
    four = two_from_one(two_from_one(tl.reshape(x, (4, 2, x.shape[1], x.shape[2], 1))))
    return tl.reshape(four, (8, x.shape[1], x.shape[2], 4, 1, 1))


@triton.jit
def dot_of(x, y):
    """x.y of vectors [8, LK, W, 1, GV, RV], in every lane [8, LK, W]."""
    of_thread = tl.reshape(tl.sum(tl.sum(x * y, 5), 4), (8, x.shape[1], x.shape[2]))
    return tl.broadcast_to(tl.sum(of_thread, 0, keep_dims=True), of_thread.shape)


@triton.jit
def over_four_slots(x):
    """The sum of x [8, LK, W] over the slots of eight lanes. The two lanes of a slot may have numbers, and sums, of their own."""
    slots = tl.reshape(x, (4, 2, x.shape[1], x.shape[2]))
    return tl.reshape(tl.broadcast_to(tl.sum(slots, 0, keep_dims=True), slots.shape), x.shape)


@triton.jit
def load_own(x, slot, mask, K: tl.constexpr):
    return tl.load(x + slot, mask & (slot < K), 0.0)


@triton.jit
def store_own(x, slot, values, mask, K: tl.constexpr):
    tl.store(x + slot, values.to(x.dtype.element_ty), mask & (slot < K))


@triton.jit
def own_start(start, length, own, K: tl.constexpr, V: tl.constexpr):
    """Of the initial slots 1 / n^2, and whether there is a slot (1 or 0), one slot per lane."""
    if start is None:
        alive = tl.where(own < min(K, V), 1.0, 0.0)
        return alive, alive
    per_square = inverse_square(own_over_channels(length) / 8)  # all eight lanes have the length
    return per_square, tl.where(per_square > 0, 1.0, 0.0)
