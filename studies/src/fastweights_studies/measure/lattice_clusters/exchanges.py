"""Sums over the channels of a head that is spread over a cluster of programs, in Gluon for Hopper GPUs.

A warp holds all K slots, K / 32 per lane, of some channels; a program has K / 32 warps, a cluster PARTS programs. So a sum over
slots stays inside a warp, and one over channels takes one exchange. The warps of a program write their parts into shared memory,
and one thread per slot adds them. Every program sends its sums to the shared memory of every program of the cluster. All warps
add the sums of the programs in the same order, so that all warps get the same bits.

There are two ways to send, chosen when a kernel is compiled:
- MBARRIER: `st.async` sends, and an mbarrier in the receiver's shared memory counts the bytes that arrive.
- otherwise: plain stores send, and all threads of the cluster wait for each other at the hardware's cluster barrier.

Exchanges with even and with odd numbers have buffers and mbarriers of their own. No warp is two exchanges ahead of another warp
of its cluster: the next exchange needs what the other warp sends after it has read the last one.
"""

from __future__ import annotations

from fastweights.kernels.runtime.gluon import gl, gluon

from .exchange_code import begin_code, lane_sums_code, receive_code, send_code


@gluon.constexpr_function
def state_layout(K, CHANNELS, PARTS):
    """The layout of a state [32, K / 32, G, CHANNELS]: lanes, slots of a lane, the G warps of a cluster, channels of a warp."""
    slots, warps = K // 32, K // 32

    def bases(dimension, first, size):
        return [[first << i if j == dimension else 0 for j in range(4)] for i in range(size.bit_length() - 1)]

    registers = bases(3, 1, CHANNELS) + bases(1, 1, slots)
    return gl.DistributedLinearLayout(
        registers, bases(0, 1, 32), bases(2, 1, warps), bases(2, warps, PARTS), [32, slots, warps * PARTS, CHANNELS]
    )


@gluon.constexpr_function
def constraints(outputs, inputs, words=0):
    return ",".join(["=f"] * outputs + ["f"] * inputs + ["r"] * words)


@gluon.jit
def sum_over_lanes(x):
    """The sums of x [32, G, COUNT] over the lanes, in all lanes."""
    COUNT: gl.constexpr = x.shape[2]
    CODE: gl.constexpr = lane_sums_code(COUNT)
    CONSTRAINTS: gl.constexpr = constraints(COUNT, COUNT)
    return gl.inline_asm_elementwise(CODE, CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def beside_slots(x, slots):
    """x [32, G], a number per lane, as [32, 1, G] in the layout of slots [32, K / 32, G]."""
    return gl.convert_layout(x, gl.SliceLayout(1, slots.type.layout), assert_trivial=True)[:, None, :]


@gluon.jit
def beside_channels(x, channels):
    """x [32, G] as [32, G, 1] in the layout of channels [32, G, channels of a warp]."""
    return gl.convert_layout(x, gl.SliceLayout(2, channels.type.layout), assert_trivial=True)[:, :, None]


@gluon.jit
def begin_exchanges(K: gl.constexpr, PARTS: gl.constexpr, SUMS: gl.constexpr, OWNED: gl.constexpr):
    """The address of the shared memory that the exchanges of a kernel use."""
    CODE: gl.constexpr = begin_code(K, PARTS, SUMS, OWNED)
    return gl.inline_asm_elementwise(CODE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_exchanges():
    """Wait for the whole cluster, as the shared memory of a program that has ended cannot be written."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_one(area, number, x, square, PARTS: gl.constexpr, MBARRIER: gl.constexpr):
    """Begin to sum x [32, K / 32, G] and square over the warps of a cluster."""
    SLOTS: gl.constexpr = x.shape[1]
    CODE: gl.constexpr = send_code(32 * SLOTS, PARTS, 1, 0, MBARRIER)
    CONSTRAINTS: gl.constexpr = constraints(SLOTS, 2 * SLOTS, 2 * SLOTS)
    gl.inline_asm_elementwise(CODE, CONSTRAINTS, [x, square, area, number], dtype=gl.float32, is_pure=False, pack=SLOTS)


@gluon.jit
def receive_one(area, number, x, PARTS: gl.constexpr, MBARRIER: gl.constexpr):
    """The sums, in all warps. x: any numbers of their shape."""
    SLOTS: gl.constexpr = x.shape[1]
    CODE: gl.constexpr = receive_code(32 * SLOTS, PARTS, 1, 0, MBARRIER)
    CONSTRAINTS: gl.constexpr = constraints(2 * SLOTS, SLOTS, 2 * SLOTS)
    return gl.inline_asm_elementwise(
        CODE, CONSTRAINTS, [x, area, number], dtype=(gl.float32, gl.float32), is_pure=False, pack=SLOTS
    )


@gluon.jit
def send_two(area, number, x, y, own, other, square, PARTS: gl.constexpr, MBARRIER: gl.constexpr):
    """Begin to sum x, y and square, and the owned sums of `own` and `other`."""
    SLOTS: gl.constexpr = x.shape[1]
    CODE: gl.constexpr = send_code(32 * SLOTS, PARTS, 2, 2, MBARRIER)
    CONSTRAINTS: gl.constexpr = constraints(SLOTS, 5 * SLOTS, 2 * SLOTS)
    gl.inline_asm_elementwise(
        CODE, CONSTRAINTS, [x, y, own, other, square, area, number], dtype=gl.float32, is_pure=False, pack=SLOTS
    )


@gluon.jit
def receive_two(area, number, x, PARTS: gl.constexpr, MBARRIER: gl.constexpr):
    """The sums of x, y and square, and for every thread an owned sum. Thread after thread of a program has `own` of the K / PARTS
    slots of the program, then `other` of these slots."""
    SLOTS: gl.constexpr = x.shape[1]
    CODE: gl.constexpr = receive_code(32 * SLOTS, PARTS, 2, 2, MBARRIER)
    CONSTRAINTS: gl.constexpr = constraints(4 * SLOTS, SLOTS, 2 * SLOTS)
    return gl.inline_asm_elementwise(
        CODE, CONSTRAINTS, [x, area, number], dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False,
        pack=SLOTS,
    )  # fmt: skip
