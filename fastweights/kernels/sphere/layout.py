"""How a program holds a state of K slots by V numbers, and the sums over it.

A tile of five dimensions [LV, LK, W, RK, RV]: LV x LK lanes of a warp, W warps, and RK x RV numbers per thread. Slot
c = (rk W + w) LK + lk, value channel j = rv LV + lv. A sum over value channels then stays inside a warp, and one over slots
crosses the warps once. Vectors repeat over the lanes that they do not depend on, [LV, LK, W, RK, 1] and [LV, LK, W, 1, RV].
Triton would choose another layout for memory that it sees to be contiguous, so the indices hide that it is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_and_channel(LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr):
    """The slot [LV, LK, W, RK, 1] and the value channel [LV, LK, W, 1, RV] of every number of a tile, the number of its thread
    [LV, LK, W, 1, 1]."""
    lv = tl.arange(0, LV)[:, None, None, None, None]
    lk = tl.arange(0, LK)[None, :, None, None, None]
    warp = tl.arange(0, W)[None, None, :, None, None]
    slot = tl.max_contiguous((tl.arange(0, RK)[None, None, None, :, None] * W + warp) * LK + lk, [1, 1, 1, 1, 1])
    channel = tl.max_contiguous(tl.arange(0, RV)[None, None, None, None, :] * LV + lv, [1, 1, 1, 1, 1])
    slot, channel = tl.broadcast_to(slot, (LV, LK, W, RK, 1)), tl.broadcast_to(channel, (LV, LK, W, 1, RV))
    return slot, channel, lv + LV * (lk + LK * warp)


@triton.jit
def over_slots_of_warp(x):
    return tl.sum(tl.sum(x, 3, keep_dims=True), 1, keep_dims=True)


@triton.jit
def over_slots(x):
    return tl.sum(over_slots_of_warp(x), 2, keep_dims=True)


@triton.jit
def both_over_slots(x, y):
    """Two sums that cross the warps together."""
    return tl.split(over_slots(tl.join(x, y)))


@triton.jit
def over_channels(x):
    total = tl.sum(tl.sum(x, 4, keep_dims=True), 0, keep_dims=True)
    return tl.broadcast_to(total, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], 1))
