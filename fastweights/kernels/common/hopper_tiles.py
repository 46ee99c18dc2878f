"""Layouts of tiles, and copies of rows to shared memory, in Gluon for Hopper GPUs."""

from __future__ import annotations

from ..runtime.gluon import async_copy, fence_async_shared, gl, gluon
from . import call

MULTIPROCESSORS = gl.constexpr(call.MULTIPROCESSORS)


@gluon.constexpr_function
def product_layout(warps, columns, depth=16):
    """Of the result [16 warps, columns] of a product; depth 16 for numbers of 16 bits, 8 for tf32."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, depth])


@gluon.constexpr_function
def token_layout(columns, warps, depth=16):
    """Of the result [64, columns] of a product; each warpgroup has a part of the columns."""
    groups = warps // 4
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, groups], instr_shape=[16, columns // groups, depth]
    )


@gluon.constexpr_function
def row_layout(warps, width, numbers=8):
    """Of rows of `width` numbers, 16 bytes per thread, which are so many numbers: 8 of 16 bits, 4 of 32."""
    return gl.BlockedLayout([1, numbers], [32 * numbers // width, width // numbers], [warps, 1], [1, 0])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def as_left(x):
    """x [rows, columns] as the left operand of a product in tf32 with numbers in the same order: of every 8 columns the even ones
    come first, as a thread's registers hold them, so that nothing moves."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 1)
    turned = x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([x.shape[0], x.shape[1]])
    return gl.convert_layout(turned, LEFT, assert_trivial=True)


@gluon.jit
def store_in_order(buffer, x):
    """Rows of x [rows, 64], columns ordered as `as_left` does."""
    buffer.store(x.reshape([x.shape[0], 8, 4, 2]).permute((0, 1, 3, 2)).reshape([x.shape[0], 64]))


@gluon.jit
def unknown_zero():
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """x, a number that all threads have alike, in a register of the whole warp. Where the assembler does not know that threads
    leave a loop together, it keeps the descriptors of products in registers of each thread, and copies them for every product."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def row_places(STRIDE: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, NUMBERS: gl.constexpr = 8):
    """Of a tile [HEIGHT, WIDTH] the rows, and the places of all numbers. A thread's rows differ by constants, which stand within
    instructions. NUMBERS: see `row_layout`."""
    LAYOUT: gl.constexpr = row_layout(gl.num_warps(), WIDTH, NUMBERS)
    LANES: gl.constexpr = WIDTH // NUMBERS
    ROWS: gl.constexpr = 32 // LANES * gl.num_warps()
    APART: gl.constexpr = gl.BlockedLayout([1, 1, NUMBERS], [1, 32 // LANES, LANES], [1, gl.num_warps(), 1], [2, 1, 0])
    IN_ROWS: gl.constexpr = gl.SliceLayout(2, APART)
    r = gl.arange(0, HEIGHT // ROWS, gl.SliceLayout(1, IN_ROWS)) * ROWS
    i = gl.arange(0, ROWS, gl.SliceLayout(0, IN_ROWS)) + unknown_zero()
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, APART)))
    row = r[:, None] + i[None, :]
    at = (r.to(gl.int64)[:, None] * STRIDE + i.to(gl.int64)[None, :] * STRIDE)[:, :, None] + c[None, None, :]
    row = gl.convert_layout(row.reshape([HEIGHT]), gl.SliceLayout(1, LAYOUT))
    at = gl.convert_layout(at.reshape([HEIGHT, WIDTH]), LAYOUT)
    return row, gl.max_contiguous(gl.multiple_of(at, [NUMBERS, NUMBERS]), [1, NUMBERS])


@gluon.jit
def show_to_products():
    """Let products read what was stored in shared memory so far: a fence and a barrier."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def load_chunk_rows(x, first, count, head, HV: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr):
    """A chunk's rows [64, K] of x [BT, HV // HEADS, K], 0 from `count` on."""
    row, at = row_places(HV // HEADS * K, 64, K)
    return gl.load(x + (first * (HV // HEADS) + head // HEADS) * K + at, (row < count)[:, None], 0.0)


@gluon.jit
def copy_rows(buffer, x, live, STRIDE: gl.constexpr, MASKED: gl.constexpr):
    """Begin to copy a tile from x on; rows from `live` on become 0."""
    row, at = row_places(STRIDE, buffer.shape[0], buffer.shape[1], 128 // buffer.dtype.primitive_bitwidth)
    if MASKED:
        async_copy.async_copy_global_to_shared(buffer, x + at, mask=(row < live)[:, None])
    else:
        async_copy.async_copy_global_to_shared(buffer, x + at)
