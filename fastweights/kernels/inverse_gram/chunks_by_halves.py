"""All chunks of a segment, one after the other, as `solve_in_turn` takes them, by programs of 4 warps of which two share a
multiprocessor: while one waits for a pivot or a product, the other goes on. A is held as two halves of its columns, and of a
product the operands come from shared memory or are one bfloat16 number at a time, so that registers hold A and one sum."""

from __future__ import annotations

from ..common.hopper_tiles import copy_rows, product_layout, row_layout, show_to_products, token_layout, unknown_zero
from ..common.math import is_bad, zero_where
from ..common.packing import program_segment
from ..runtime.gluon import async_copy, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .chunks_in_turn import FLOATS, LINE, PLAIN, eliminate_in_place, larger, store_as_two, store_columns
from .sums import split_first_bits


@gluon.jit
def store_three(tiles, x):
    """x as the sum of three bfloat16 numbers."""
    high, rest = split_first_bits(x)
    middle, rest = split_first_bits(rest)
    low, rest = split_first_bits(rest)
    tiles.index(0).store(high)
    tiles.index(1).store(middle)
    tiles.index(2).store(low)


@gluon.jit
def unknown(x):
    """x; what was found from it before is found again."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def places_of_half(K: gl.constexpr, LAYOUT: gl.constexpr):
    """Of [K, 64] in a matrix [K, K]. A thread's places differ by constants, which stand within instructions; its first one is
    found again where it is needed."""
    r = gl.arange(0, K, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    apart = r // 8 * (8 * K) + c // 8 * 8 + c % 2
    own = r % 8 * K + (c % 8 - c % 2)
    return gl.max_contiguous(gl.multiple_of(own + unknown_zero() + apart, [2, 2]), [1, 2])


@gluon.jit
def add_times_tokens(out, x, b):
    """out + x b with x [K, 64] as three bfloat16 numbers, one after the other, and b [64, 64] in shared memory."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
    high, rest = split_first_bits(x)
    middle, rest = split_first_bits(rest)
    low, rest = split_first_bits(rest)
    left = gl.convert_layout(low, LEFT)
    out = warpgroup_mma(left, b, out, is_async=True)
    out, left = warpgroup_mma_wait(0, deps=[out, left])
    high, rest = split_first_bits(unknown(x))
    middle, rest = split_first_bits(rest)
    left = gl.convert_layout(middle, LEFT)
    out = warpgroup_mma(left, b, out, is_async=True)
    out, left = warpgroup_mma_wait(0, deps=[out, left])
    high, rest = split_first_bits(unknown(x))
    left = gl.convert_layout(high, LEFT)
    out = warpgroup_mma(left, b, out, is_async=True)
    out, left = warpgroup_mma_wait(0, deps=[out, left])
    return out


@gluon.jit
def times_columns(halves, FIRST: gl.constexpr):
    """x x^T in the precision of float32, 64 columns of it, from x [K, 64] as two numbers of tf32."""
    K: gl.constexpr = halves.shape[1]
    high, rest = halves.index(0), halves.index(1)
    out = gl.zeros([K, 64], gl.float32, product_layout(gl.num_warps(), 64, 8))
    out = warpgroup_mma(rest, high.slice(FIRST, 64).permute((1, 0)), out, use_acc=False, is_async=True)
    out = warpgroup_mma(high, rest.slice(FIRST, 64).permute((1, 0)), out, is_async=True)
    out = warpgroup_mma(high, high.slice(FIRST, 64).permute((1, 0)), out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    return gl.convert_layout(out, product_layout(gl.num_warps(), 64, 16), assert_trivial=True)


@gluon.jit(do_not_specialize=["time"])
def solve_by_halves(
    u, gain, A, R, D, y, segments, time,
    HV: gl.constexpr, K: gl.constexpr, LENGTH: gl.constexpr, HEADS: gl.constexpr, HEADS_GAIN: gl.constexpr,
):  # fmt: skip
    """Arguments as of `solve_segment`; 4 warps and 128 channels."""
    WARPS: gl.constexpr = gl.num_warps()
    TALL: gl.constexpr = product_layout(WARPS, 64, 16)
    TALL_FLOATS: gl.constexpr = product_layout(WARPS, 64, 8)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    READ: gl.constexpr = row_layout(WARPS, K)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TALL)
    U_ROW: gl.constexpr = HV // HEADS * K
    p, head, first, count, chunk = program_segment(segments, time, LENGTH)
    chunk = gl.where(count > 0, chunk, 0)  # of a number that no segment has it may be any
    tokens = gl.allocate_shared_memory(
        gl.bfloat16, [2, 64, K], gl.NVMMASharedLayout.get_default_for([64, K], gl.bfloat16)
    )
    lines = gl.allocate_shared_memory(gl.float32, [4 * 64], LINE)  # a power of two
    gains, divisors, weights = lines.slice(0, 64), lines.slice(64, 64), lines.slice(128, 64)
    u += (first * (HV // HEADS) + head // HEADS) * K
    copy_rows(tokens.index(0), u, count, U_ROW, True)
    async_copy.commit_group()
    at = places_of_half(K, TALL)
    first_half = gl.load(A + (chunk * HV + head) * (K * K) + at)
    second_half = gl.load(A + (chunk * HV + head) * (K * K) + 64 + at)
    t = gl.arange(0, 64, BY_TOKEN)
    steps = (count + 63) // 64
    for step in range(0, steps):
        token, left = first + step * 64, count - step * 64
        number = (chunk + step) * HV + head
        U = tokens.index(step % 2)
        async_copy.wait_group(0)
        show_to_products()
        u += 64 * U_ROW
        copy_rows(tokens.index((step + 1) % 2), u, left - 64, U_ROW, True)
        async_copy.commit_group()
        at = places_of_half(K, TALL)
        gl.store(A + number * (K * K) + at, first_half)
        gl.store(A + number * (K * K) + 64 + at, second_half)

        given = U.load(READ)
        bad = is_bad(given)
        bad_token = gl.max(bad.to(gl.int32), 1)
        spoils = gl.max(bad_token, 0) > 0
        if gain is not None:
            gates = gain + token * (HV // HEADS_GAIN) + head // HEADS_GAIN
            gate = gl.load(gates + t * (HV // HEADS_GAIN), t < left, 0.0)
            bad_gate = is_bad(gate)
            gains.store(zero_where(gate, bad_gate).to(gl.float32))
            spoils = spoils | (gl.max(bad_gate.to(gl.int32), 0) > 0)
        spoiled = gl.zeros([64], gl.int32, BY_TOKEN)
        if spoils:
            U.store(zero_where(given, bad))
            spoiled = gl.convert_layout(bad_token, BY_TOKEN)
            if gain is not None:
                spoiled = gl.maximum(spoiled, bad_gate.to(gl.int32))
            spoiled = gl.associative_scan(spoiled, 0, larger)
            show_to_products()

        rows = gl.zeros([K, 64], gl.float32, TALL)
        rows = add_times_tokens(rows, first_half, U.slice(0, 64, dim=1).permute((1, 0)))
        rows = add_times_tokens(rows, second_half, U.slice(64, 64, dim=1).permute((1, 0)))
        parts = gl.allocate_shared_memory(
            gl.bfloat16, [3, K, 64], gl.NVMMASharedLayout.get_default_for([K, 64], gl.bfloat16)
        )
        store_three(parts, rows)
        show_to_products()
        nothing = gl.zeros([64, 64], gl.float32, SQUARE)
        products = warpgroup_mma(U, parts.index(2), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma(U, parts.index(1), products, is_async=True)
        products = warpgroup_mma(U, parts.index(0), products, is_async=True)
        products = warpgroup_mma_wait(0, deps=[products])
        square = gl.allocate_shared_memory(gl.float32, [64, 64], PLAIN)
        square.store(products)

        eliminate_in_place(square, gains if gain is not None else None, divisors, weights)

        i = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None]
        j = gl.arange(0, 64, gl.SliceLayout(0, LINES))[None, :]
        lower = gl.where(i >= j, square.load(LINES), 0.0)
        factors = gl.allocate_shared_memory(
            gl.bfloat16, [3, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
        )
        store_three(factors, lower)
        gl.store(D + token * HV + head + t * HV, divisors.load(BY_TOKEN), t < left)
        show_to_products()
        found = gl.zeros([K, 64], gl.float32, TALL)
        for k in gl.static_range(3):
            for l in gl.static_range(3):
                if k >= l:  # the smallest products first
                    found = warpgroup_mma(
                        parts.index(2 - k), factors.index(k - l).permute((1, 0)), found, is_async=True
                    )
        found = warpgroup_mma_wait(0, deps=[found])
        gl.thread_barrier()  # no warp reads these tiles any more
        at_token = (token * HV + head) * K
        store_columns(found, R + at_token, left, HV * K)
        weight = weights.load(COLUMN)
        if y is not None:
            spoiled = gl.convert_layout(spoiled, COLUMN)
            answer = gl.where((spoiled > 0)[None, :], float("nan"), found * weight[None, :])
            store_columns(answer, y + at_token, left, HV * K)
        found *= gl.sqrt(weight)[None, :]
        halves = gl.allocate_shared_memory(gl.float32, [2, K, 64], FLOATS)
        store_as_two(halves.index(0), halves.index(1), found)
        show_to_products()
        ruin = gl.where(spoils, float("nan"), 0.0)
        first_half = first_half - times_columns(halves, 0) + ruin
        second_half = second_half - times_columns(halves, 64) + ruin
        gl.thread_barrier()  # no warp reads the halves any more
    async_copy.wait_group(0)
