"""How a program holds a state of K slots by V numbers, and the sums over it.

A tile of six dimensions [LV, LK, W, RK, GV, RV]: LV x LK lanes of a warp, W warps, and RK x GV x RV numbers per thread. Slot
c = (w LK + lk) RK + rk, value channel j = (gv LV + lv) RV + rv. A sum over value channels then stays inside a warp, and one over
slots crosses the warps once. Vectors repeat over the lanes that they do not depend on, [LV, LK, W, RK, 1, 1] and
[LV, LK, W, 1, GV, RV]. words.py moves four neighbours together: RV = 4, and RK is a multiple of 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import halve


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
    even, odd = (
        tl.join(take_lane(own, lane), take_lane(own, lane + 8)),
        tl.join(take_lane(own, lane + 16), take_lane(own, lane + 24)),
    )
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
