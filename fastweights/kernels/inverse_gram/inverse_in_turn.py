"""Where tokens also add to A, in Gluon for Hopper GPUs in bfloat16: `carry_inverse`, and the tokens of all chunks from it. See
the head of this package.

A stays in registers. As in plain Triton, Newton's iteration finds the inverse of the tokens' products roughly, in tf32, and what
it makes of the rows is refined: for the next A no factor is needed. `factor_tokens` finds those of all chunks in parallel."""

from __future__ import annotations

from ..common.hopper_tiles import (
    add,
    as_left,
    copy_rows,
    load_chunk_rows,
    product_layout,
    row_layout,
    show_to_products,
    store_in_order,
    token_layout,
)
from ..common.math import is_bad, zero_where
from ..common.packing import pieces_of_sequence, program_chunk, tokens_of_sequence
from ..runtime.gluon import async_copy, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .answers import split_into
from .carried import COARSE, FAR, FINE, ROUNDING
from .chunks_in_turn import FLOATS, LINE, PLAIN, eliminate_in_place, store_as_two, store_columns, times_floats


@gluon.jit
def store_three(tiles, x):
    """x as the sum of three bfloat16 numbers."""
    parts = split_into(x, 3)
    for k in gl.static_range(3):
        tiles.index(k).store(parts[k])


@gluon.jit
def times_three(x, tiles, LAYOUT: gl.constexpr, TURNED: gl.constexpr):
    """x y in the precision of float32, with y from `store_three`, or TURNED its transpose."""
    parts = split_into(x, 3)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    high, middle = gl.convert_layout(parts[0], LEFT), gl.convert_layout(parts[1], LEFT)
    low = gl.convert_layout(parts[2], LEFT)
    lefts = (low, middle, high)
    COLUMNS: gl.constexpr = tiles.shape[1] if TURNED else tiles.shape[2]
    out = gl.zeros([x.shape[0], COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(3):
        for j in gl.static_range(3):
            if i >= j:  # the smallest products first
                right = tiles.index(i - j).permute((1, 0)) if TURNED else tiles.index(i - j)
                out = warpgroup_mma(lefts[i], right, out, is_async=True)
    out, low, middle, high = warpgroup_mma_wait(0, deps=[out, low, middle, high])
    return out


@gluon.jit
def times_rough(x, tile, out):
    """out + x y^T in tf32: x [rows, 64] in registers, y from `store_in_order`."""
    left = as_left(x)
    out = warpgroup_mma(left, tile.permute((1, 0)), out, is_async=True)
    out, left = warpgroup_mma_wait(0, deps=[out, left])
    return out


@gluon.jit
def update_by_tokens(now, u, added, count, U_ROW: gl.constexpr):
    """A after `count` tokens, by Sherman and Morrison's formula; a bad number counts as 0. u: the first token's row; added: what
    tokens add to A, from the first one on."""
    K: gl.constexpr = now.shape[0]
    LAYOUT: gl.constexpr = now.type.layout
    r = gl.arange(0, K, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    for t in range(0, count):
        of_row, of_column = gl.load(u + t * U_ROW + r), gl.load(u + t * U_ROW + c)
        of_row = zero_where(of_row, is_bad(of_row)).to(gl.float32)
        of_column = zero_where(of_column, is_bad(of_column)).to(gl.float32)
        found, same = gl.sum(now * of_column[None, :], 1), gl.sum(now * of_row[:, None], 0)
        found /= 1.0 + gl.sum(found * of_row, 0)
        now -= found[:, None] * same[None, :]
        now += gl.where(r[:, None] == c[None, :], gl.load(added + t), 0.0)
    return now


@gluon.jit(do_not_specialize=["time"])
def carry_in_turn(
    u, refresh, start, A, end, W, S, cu_seqlens, time, HV: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr
):
    """Arguments as of `carry_inverse`, and for `factor_tokens` W = U A of all tokens [BT, HV, K], where tokens add to A what each
    finds of it, and S [M, HV, 64, 64], the products W U^T of a chunk."""
    WARPS: gl.constexpr = gl.num_warps()
    WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
    TALL: gl.constexpr = product_layout(WARPS, 64, 16)
    TALL_FLOATS: gl.constexpr = product_layout(WARPS, 64, 8)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    SQUARE_FLOATS: gl.constexpr = token_layout(64, WARPS, 8)
    READ: gl.constexpr = row_layout(WARPS, K)
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    U_ROW: gl.constexpr = HV // HEADS * K
    n, head = gl.program_id(0), gl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, time)
    low, chunks = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    chunk = low.to(gl.int64)
    sequence = (n.to(gl.int64) * HV + head) * (K * K)
    tokens = gl.allocate_shared_memory(
        gl.bfloat16, [2, 64, K], gl.NVMMASharedLayout.get_default_for([64, K], gl.bfloat16)
    )
    parts = gl.allocate_shared_memory(
        gl.bfloat16, [3, K, 64], gl.NVMMASharedLayout.get_default_for([K, 64], gl.bfloat16)
    )
    squares = gl.allocate_shared_memory(gl.float32, [2, 64, 64], FLOATS)
    inverse = gl.allocate_shared_memory(gl.float32, [64, 64], FLOATS)
    change = gl.allocate_shared_memory(gl.float32, [64, 64], FLOATS)
    before = gl.allocate_shared_memory(gl.float32, [64], LINE)
    u += (first * (HV // HEADS) + head // HEADS) * K
    copy_rows(tokens.index(0), u, count, U_ROW, True)
    async_copy.commit_group()
    r = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
    at = r * K + c
    now = gl.load(start + sequence + at)
    now += gl.where(gl.max(gl.max(is_bad(now).to(gl.int32), 1), 0) > 0, float("nan"), 0.0)
    t = gl.arange(0, 64, BY_TOKEN)
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    for step in range(0, (count + 63) // 64):
        token, left = first + step * 64, count - step * 64
        number = (chunk + step) * HV + head
        U = tokens.index(step % 2)
        added = gl.load(refresh + token + t, t < left, 0.0)
        async_copy.wait_group(0)
        show_to_products()
        copy_rows(tokens.index((step + 1) % 2), u + 64 * U_ROW, left - 64, U_ROW, True)
        async_copy.commit_group()
        given = U.load(READ)
        bad = is_bad(given)
        spoils = gl.max(gl.max(bad.to(gl.int32), 1), 0) > 0
        if spoils:
            U.store(zero_where(given, bad))
        total = gl.sum(added, 0)
        before.store(gl.associative_scan(added, 0, add) - added)
        show_to_products()

        LEFT: gl.constexpr = gl.DotOperandLayout(0, TALL, 2)
        bits = split_into(now, 3)
        high, middle = gl.convert_layout(bits[0], LEFT), gl.convert_layout(bits[1], LEFT)
        low_bits = gl.convert_layout(bits[2], LEFT)
        rows = gl.zeros([K, 64], gl.float32, TALL)
        nothing = gl.zeros([64, 64], gl.float32, SQUARE)
        overlaps = warpgroup_mma(U, U.permute((1, 0)), nothing, use_acc=False, is_async=True)
        rows = warpgroup_mma(low_bits, U.permute((1, 0)), rows, use_acc=False, is_async=True)
        rows = warpgroup_mma(middle, U.permute((1, 0)), rows, is_async=True)
        rows = warpgroup_mma(high, U.permute((1, 0)), rows, is_async=True)
        gl.store(A + number * (K * K) + at, now)  # while the products run
        rows, low_bits, middle, high, overlaps = warpgroup_mma_wait(0, deps=[rows, low_bits, middle, high, overlaps])
        rows += before.load(gl.SliceLayout(0, TALL))[None, :] * U.permute((1, 0)).load(TALL).to(gl.float32)
        store_three(parts, rows)
        show_to_products()
        products = warpgroup_mma(U, parts.index(2), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma(U, parts.index(1), products, is_async=True)
        products = warpgroup_mma(U, parts.index(0), products, is_async=True)
        store_columns(rows, W + (token * HV + head) * K, left, HV * K)
        products = warpgroup_mma_wait(0, deps=[products])
        # Of a pair the earlier token's addition counts; the rows of a column hold that column's.
        later = before.load(gl.SliceLayout(0, SQUARE))[None, :] - before.load(gl.SliceLayout(1, SQUARE))[:, None]
        products -= gl.maximum(later, 0.0) * overlaps

        largest = 1.0 + gl.sqrt(gl.sum(gl.sum(products * products, 1), 0))
        close = largest * ROUNDING <= FAR  # not where a number is bad
        gl.store(S + number * 4096 + i * 64 + j, products)
        if close:
            identity = gl.where(i == j, 1.0, 0.0)
            products += identity
            scale = 2.0 / (1.0 + largest)
            found_inverse = gl.convert_layout(
                scale * (2.0 * identity - scale * products), SQUARE_FLOATS, assert_trivial=True
            )
            remains = (1.0 - scale) * (1.0 - scale)
            store_as_two(squares.index(0), squares.index(1), products)
            store_in_order(inverse, found_inverse)
            show_to_products()
            identity = gl.convert_layout(identity, SQUARE_FLOATS, assert_trivial=True)
            while remains > COARSE:
                none = gl.zeros([64, 64], gl.float32, SQUARE_FLOATS)
                rest = warpgroup_mma(inverse, squares.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
                rest = warpgroup_mma_wait(0, deps=[rest])
                store_in_order(change, identity - rest)
                show_to_products()
                found_inverse = warpgroup_mma(change, inverse.permute((1, 0)), found_inverse, is_async=True)
                found_inverse = warpgroup_mma_wait(0, deps=[found_inverse])
                gl.thread_barrier()  # no warp reads the inverse any more
                store_in_order(inverse, found_inverse)
                show_to_products()
                remains *= remains
            rows_floats = gl.convert_layout(rows, TALL_FLOATS, assert_trivial=True)
            taken = times_rough(rows_floats, inverse, gl.zeros([K, 64], gl.float32, TALL_FLOATS))
            factor = gl.maximum(remains, largest * ROUNDING)
            remains = factor
            while remains > FINE:
                missed = rows_floats - times_floats(taken, squares.index(1), squares.index(0), TALL_FLOATS)
                taken = times_rough(missed, inverse, taken)
                remains *= factor
            now -= times_three(gl.convert_layout(taken, TALL, assert_trivial=True), parts, WHOLE, True)
            now += gl.where(r == c, total, 0.0)
        else:  # weights far beyond those of the prior
            now = update_by_tokens(now, u, refresh + token, gl.minimum(left, 64), U_ROW)
        now += gl.where(spoils, float("nan"), 0.0)
        u += 64 * U_ROW
        gl.thread_barrier()  # no warp's products read the tiles of this chunk any more
    if end is not None:
        gl.store(end + sequence + at, now)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["time"])
def factor_tokens(R, D, T, chunks, time, HV: gl.constexpr, K: gl.constexpr):
    """R holds W and takes r, T holds S and takes T, of what `carry_in_turn` leaves; D [BT, HV] takes d."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = token_layout(K, WARPS)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], gl.bfloat16)
    square = gl.allocate_shared_memory(gl.float32, [64, 64], PLAIN)
    lines = gl.allocate_shared_memory(gl.float32, [2 * 64], LINE)
    divisors, weights = lines.slice(0, 64), lines.slice(64, 64)
    parts = gl.allocate_shared_memory(gl.bfloat16, [3, 64, K], TILE)
    T += (m.to(gl.int64) * HV + head) * 4096
    i = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, LINES))[None, :]
    square.store(gl.load(T + i * 64 + j))
    store_three(parts, load_chunk_rows(R, first, count, head, HV, 1, K))
    show_to_products()
    eliminate_in_place(square, None, divisors, weights)
    gl.store(T + i * 64 + j, gl.where(i >= j, square.load(LINES), 0.0))
    t = gl.arange(0, 64, BY_TOKEN)
    gl.store(D + first * HV + head + t * HV, divisors.load(BY_TOKEN), t < count)
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    lower = gl.where(i >= j, square.load(SQUARE), 0.0)
    found = times_three(lower, parts, WIDE, False)
    t = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    c = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    at = (first * HV + head) * K + t[:, None] * (HV * K) + c[None, :]
    gl.store(R + at, found, (t < count)[:, None])
