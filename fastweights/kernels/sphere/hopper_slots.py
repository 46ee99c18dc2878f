"""Slots and tokens of a chunk across the threads of a program, in Gluon for Hopper GPUs: four lanes have the 16 tokens of a slot.

A program has 8 slots per warp. A tile of slots and tokens is four groups [slots, 4] of one number per thread: token 4 i + j of a
slot is in group i of lane j. The slots, or the gradient in them, are a tile [warps, slots, V / warps], a part of the channels per
warp, so that it is an operand of the products with the h of a chunk as it is; what the parts give is added up in shared memory.
"""

from __future__ import annotations

from ..runtime.gluon import async_copy, gl, gluon

ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS_OF_16 = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))  # float32, read as a tile and written by fours


@gluon.constexpr_function
def tile_layout(warps):
    """Of slots and tokens [8 warps, 16] or [8 warps, 4]: tokens across four lanes."""
    return gl.BlockedLayout([1, 1], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def fours_layout(warps):
    """Of the same, where a thread has four neighbours."""
    return gl.BlockedLayout([1, 4], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def state_layout(warps):
    """Of the result of a product per warp [warps, 8 warps, columns]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def parts_layout(warps):
    """Of the same [warps, 8 warps, 16], where a thread has what all warps found and the slots and tokens of a tile."""
    return gl.BlockedLayout([warps, 1, 1], [1, 8, 4], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def copied_layout(warps, V):
    """Of a chunk's vectors [warps, 16, V / warps], 16 bytes per thread, where they are copied to shared memory."""
    lanes = V // (8 * warps)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def shared_layout(warps, V):
    """Of the same in shared memory, so that the rows of an operand lie in different banks."""
    lanes = V // (8 * warps)
    return gl.SwizzledSharedLayout(8, 8 // lanes, lanes, [2, 1, 0])


@gluon.constexpr_function
def shuffle(kind, number):
    """Assembly of a shuffle among the four lanes of a slot."""
    last = "0x1c1f" if kind == "idx" else "0x1c00"
    return f"shfl.sync.{kind}.b32 $0, $1, {number}, {last}, 0xffffffff;"


@gluon.jit
def share(x, lane: gl.constexpr):
    """What this lane of a slot has, for all four."""
    return gl.inline_asm_elementwise(shuffle("idx", lane), "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def lanes_before(x, by: gl.constexpr):
    """What the lane so many before has; the first lanes keep their own."""
    return gl.inline_asm_elementwise(shuffle("up", by), "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def as_groups(x):
    """A tile [slots, 16], or [1, 16], as four groups."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    HEIGHT: gl.constexpr = x.shape[0]
    low, high = gl.split(x.reshape([HEIGHT, 2, 2, 4]).permute((0, 2, 3, 1)))
    first, second = gl.split(low.permute((0, 2, 1)))
    third, fourth = gl.split(high.permute((0, 2, 1)))
    return (
        gl.convert_layout(first, TILE, assert_trivial=True), gl.convert_layout(second, TILE, assert_trivial=True),
        gl.convert_layout(third, TILE, assert_trivial=True), gl.convert_layout(fourth, TILE, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def as_tile(x):
    """The other way round."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    low, high = gl.join(x[0], x[1]), gl.join(x[2], x[3])
    whole = gl.join(low, high).permute((0, 3, 2, 1)).reshape([x[0].shape[0], 16])
    return gl.convert_layout(whole, TILE, assert_trivial=True)


@gluon.jit
def copy_vectors(buffer, x, count, HV: gl.constexpr, V: gl.constexpr):
    """Begin to copy a chunk's vectors from x on to shared memory [warps, 16, V / warps]; those past `count` become 0."""
    WARPS: gl.constexpr = gl.num_warps()
    COPIED: gl.constexpr = copied_layout(WARPS, V)
    part = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, COPIED)))[:, None, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COPIED)))[None, :, None]
    channel = gl.arange(0, V // WARPS, gl.SliceLayout(0, gl.SliceLayout(1, COPIED)))[None, None, :]
    at = token * (HV * V) + part * (V // WARPS) + channel
    at = gl.max_contiguous(gl.multiple_of(at, [1, 1, 8]), [1, 1, 8])
    async_copy.async_copy_global_to_shared(buffer, x + at, mask=(token < count) & (part >= 0) & (channel >= 0))


@gluon.jit
def find_chunk(first, stop, m, chunk, head, HV: gl.constexpr):
    """Of chunk number `chunk` of a sequence: the place of its first token's head, its own, and how many tokens it has."""
    begin = first + chunk * 16
    return begin * HV + head, (m + chunk) * HV + head, gl.minimum(stop - begin, 16).to(gl.int32)
