"""How a program holds a state of K slots by V numbers, and the sums over it.

A tile of six dimensions [LV, LK, W, RK, GV, RV]: LV x LK lanes of a warp, W warps, and RK x GV x RV numbers per thread. Slot
c = (w LK + lk) RK + rk, value channel j = (gv LV + lv) RV + rv. A sum over value channels then stays inside a warp, and one over
slots crosses the warps once. Vectors repeat over the lanes that they do not depend on, [LV, LK, W, RK, 1, 1] and
[LV, LK, W, 1, GV, RV]. RK = RV = 4: words.py moves the four neighbours of a thread together.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hidden(x):
    """x; Triton would choose another layout for memory that it sees to be contiguous, and does not look through a shift."""
    return (x * 2) >> 1


@triton.jit
def slot_and_channel(
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr
):
    """In units of four: the first slot of every thread [LV, LK, W, 1, 1, 1] and the first channel of each of its groups
    [LV, LK, W, 1, GV, 1]; and the number of the thread [LV, LK, W, 1, 1, 1]."""
    lv = tl.arange(0, LV)[:, None, None, None, None, None]
    lk = tl.arange(0, LK)[None, :, None, None, None, None]
    warp = tl.arange(0, W)[None, None, :, None, None, None]
    group = tl.arange(0, GV)[None, None, None, None, :, None]
    slot = tl.broadcast_to(hidden(warp * LK + lk), (LV, LK, W, 1, 1, 1))
    channel = tl.broadcast_to(group * LV + hidden(lv), (LV, LK, W, 1, GV, 1))
    return slot, channel, lv + LV * (lk + LK * warp)


@triton.jit
def over_slots_of_warp(x):
    return tl.sum(tl.sum(x, 3, keep_dims=True), 1, keep_dims=True)


@triton.jit
def over_warps(x):
    """The sum of x [LV, 1, W, 1, GV, RV, P] over W. What crosses shared memory is flattened with the lanes as its fastest
    dimension: Triton puts the numbers of a thread next to each other, and then all lanes meet in one bank."""
    LV: tl.constexpr = x.shape[0]
    GV: tl.constexpr = x.shape[4]
    RV: tl.constexpr = x.shape[5]
    P: tl.constexpr = x.shape[6]
    flat = tl.reshape(tl.permute(x, (4, 5, 6, 0, 1, 3, 2)), (GV * RV * P * LV, x.shape[2]))
    total = tl.reshape(tl.sum(flat, 1), (GV, RV, P, LV, 1, 1, 1))
    return tl.permute(total, (3, 4, 6, 5, 0, 1, 2))


@triton.jit
def over_slots(x):
    total = over_warps(tl.expand_dims(over_slots_of_warp(x), 6))
    return tl.reshape(total, (x.shape[0], 1, 1, 1, x.shape[4], x.shape[5]))


@triton.jit
def both_over_slots(x, y):
    """Two sums that cross the warps together."""
    return tl.split(over_warps(over_slots_of_warp(tl.join(x, y))))


@triton.jit
def over_channels(x):
    total = tl.sum(tl.sum(tl.sum(x, 5, keep_dims=True), 4, keep_dims=True), 0, keep_dims=True)
    return tl.broadcast_to(total, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], 1, 1))
