"""A_t b_t of all tokens from A at the chunks' starts, in Gluon for Hopper GPUs: `solve_tokens`, see the head of this package.

Numbers of float32 are sums of bfloat16 ones: of three where results must be exact, else of two."""

from __future__ import annotations

from ..common.hopper_tiles import (
    MULTIPROCESSORS,
    add,
    load_chunk_rows,
    product_layout,
    show_to_products,
    token_layout,
)
from ..common.math import is_bad, zero_where
from ..common.packing import chunk_place, program_chunk
from ..runtime.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .chunks_in_turn import larger, store_columns
from .sums import split_first_bits


@gluon.jit
def split_into(x, COUNT: gl.constexpr):
    """So many bfloat16 numbers whose sum is x."""
    parts, rest = (), x
    for _ in gl.static_range(COUNT):
        part, rest = split_first_bits(rest)
        parts += (part,)
    return parts


@gluon.jit
def fetch_rows(x, live, STRIDE: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Ask the L2 cache for rows of WIDTH numbers of x, STRIDE apart, those before `live` of HEIGHT, by lines of 128 bytes."""
    NUMBERS: gl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = WIDTH // NUMBERS
    line = gl.arange(0, HEIGHT * LINES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row = line // LINES
    places = x + (row.to(gl.int64) * STRIDE + line % LINES * NUMBERS)
    gl.inline_asm_elementwise(
        "{ .reg .pred live; setp.ne.s32 live, $2, 0; @live prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [places.to(gl.int64), (row < live).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_later_chunk(
    chunks, time, u, A, R, b, HV: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, HEADS_B: gl.constexpr
):
    """What the program reads that takes this one's place on a multiprocessor, which 128 // K share."""
    programs = gl.num_programs(0)
    number = gl.program_id(1) * programs + gl.program_id(0) + 128 // K * MULTIPROCESSORS
    m, head = number % programs, number // programs
    first, count = chunk_place(chunks, m, time)
    count = gl.where(head < HV, count, 0)
    fetch_rows(A + (m.to(gl.int64) * HV + head) * (K * K), gl.where(count > 0, K, 0), K, K, K)
    fetch_rows(R + (first * HV + head) * K, count, HV * K, 64, K)
    fetch_rows(u + (first * (HV // HEADS) + head // HEADS) * K, count, HV // HEADS * K, 64, K)
    fetch_rows(b + (first * (HV // HEADS_B) + head // HEADS_B) * K, count, HV // HEADS_B * K, 64, K)


@gluon.jit(do_not_specialize=["time"])
def answer_tokens(
    u, gain, refresh, A, R, D, b, out, chunks, time,
    HV: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, HEADS_GAIN: gl.constexpr, HEADS_B: gl.constexpr,
    SCALED: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Arguments as of `solve_tokens`."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    PARTS: gl.constexpr = 3 if EXACT else 2
    PARTS_B: gl.constexpr = 1 if b.dtype.element_ty == gl.bfloat16 else PARTS
    WARPS: gl.constexpr = gl.num_warps()
    WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
    TALL: gl.constexpr = product_layout(WARPS, 64, 16)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TALL, 2)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    EARLIER: gl.constexpr = gl.SliceLayout(0, SQUARE)
    TOKEN: gl.constexpr = gl.SliceLayout(0, TALL)
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], gl.bfloat16)
    number = m.to(gl.int64) * HV + head
    r = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
    inverse = gl.load(A + number * (K * K) + r * K + c)
    given = load_chunk_rows(b, first, count, head, HV, HEADS_B, K)
    rows = load_chunk_rows(R, first, count, head, HV, 1, K)
    keys = load_chunk_rows(u, first, count, head, HV, HEADS, K)
    s = gl.arange(0, 64, EARLIER)
    t = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    weight = 1.0 / gl.load(D + first * HV + head + s * HV, s < count, 1.0)
    if gain is not None:
        gain += first * (HV // HEADS_GAIN) + head // HEADS_GAIN
        gate = gl.load(gain + s * (HV // HEADS_GAIN), s < count, 0.0)
        weight *= zero_where(gate, is_bad(gate)).to(gl.float32)

    bad = is_bad(given)
    asked = gl.allocate_shared_memory(gl.bfloat16, [PARTS_B, 64, K], TILE)
    if PARTS_B == 1:
        asked.index(0).store(zero_where(given, bad))
    else:
        parts = split_into(zero_where(given, bad), PARTS_B)
        for k in gl.static_range(PARTS_B):
            asked.index(k).store(parts[k])
    solved = gl.allocate_shared_memory(gl.bfloat16, [PARTS, 64, K], TILE)
    parts = split_into(rows, PARTS)
    for k in gl.static_range(PARTS):
        solved.index(k).store(parts[k])
    show_to_products()
    fetch_later_chunk(chunks, time, u, A, R, b, HV, K, HEADS, HEADS_B)  # this program's own loads have ended
    scores = gl.zeros([64, 64], gl.float32, SQUARE)
    for i in gl.static_range(PARTS):
        for j in gl.static_range(PARTS_B):
            if i >= j:  # the smallest products first
                right = solved.index(PARTS - 1 - i).permute((1, 0))
                scores = warpgroup_mma(asked.index(j), right, scores, is_async=True)
    found = gl.zeros([K, 64], gl.float32, TALL)
    lefts = ()
    parts = split_into(inverse, PARTS)
    for k in gl.static_range(PARTS):
        lefts += (gl.convert_layout(parts[k], LEFT),)
    scores = warpgroup_mma_wait(0, deps=[scores])
    # Made before the products with b begin: the compiler takes what these read as free from then on.
    weighed = gl.allocate_shared_memory(
        gl.bfloat16, [PARTS, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    )
    for i in gl.static_range(PARTS):
        for j in gl.static_range(PARTS_B):
            if i >= j:
                right = asked.index(j).permute((1, 0))
                found = warpgroup_mma(lefts[PARTS - 1 - i], right, found, is_async=True)
    scores = gl.where(t[:, None] >= s[None, :], scores * -weight[None, :], 0.0)
    parts = split_into(scores, PARTS)
    for k in gl.static_range(PARTS):
        weighed.index(k).store(parts[k])
    show_to_products()
    for i in gl.static_range(PARTS):
        for j in gl.static_range(PARTS):
            if i >= j:
                left = solved.index(PARTS - 1 - i).permute((1, 0))
                found = warpgroup_mma(left, weighed.index(j).permute((1, 0)), found, is_async=True)
    if EXACT:
        found, x, y, z = warpgroup_mma_wait(0, deps=[found, lefts[0], lefts[1], lefts[2]])
    else:
        found, x, y = warpgroup_mma_wait(0, deps=[found, lefts[0], lefts[1]])
    gl.thread_barrier()  # the sums below may take the place of what the other warps' products read
    t = gl.arange(0, 64, TOKEN)
    if SCALED:
        found *= gl.load(gain + t * (HV // HEADS_GAIN), t < count, 0.0).to(gl.float32)[None, :]
    if refresh is not None:
        t = gl.arange(0, 64, BY_TOKEN)
        added = gl.associative_scan(gl.load(refresh + first + t, t < count, 0.0), 0, add)
        added = gl.convert_layout(added, TOKEN)
        for k in gl.static_range(PARTS_B):
            found += added[None, :] * asked.index(k).permute((1, 0)).load(TALL).to(gl.float32)
    bad_keys = is_bad(keys)
    spoils = gl.max(gl.max((bad | bad_keys).to(gl.int32), 1), 0)
    t = gl.arange(0, 64, BY_TOKEN)
    if gain is not None:
        bad_gate = is_bad(gl.load(gain + t * (HV // HEADS_GAIN), t < count, 0.0)).to(gl.int32)
        spoils = gl.maximum(spoils, gl.max(bad_gate, 0))
    if spoils > 0:
        spoiled = gl.convert_layout(gl.max(bad_keys.to(gl.int32), 1), BY_TOKEN)
        if gain is not None:
            spoiled = gl.maximum(spoiled, bad_gate)
        spoiled = gl.associative_scan(spoiled, 0, larger)
        spoiled = gl.maximum(spoiled, gl.convert_layout(gl.max(bad.to(gl.int32), 1), BY_TOKEN))
        found = gl.where((gl.convert_layout(spoiled, TOKEN) > 0)[None, :], float("nan"), found)
    store_columns(found, out + (first * HV + head) * K, count, HV * K)
