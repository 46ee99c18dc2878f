"""All chunks of a segment, one after the other, in Gluon for Hopper GPUs: see the head of this package.

A stays in registers, as a sum of three bfloat16 numbers per number the left operand of a product with the keys. The tokens'
products [64, 64] are eliminated in place, 16 columns at a time: a warp holds the rows of the block, and every row besides in
one lane. Where L or p of a block of rows g are no longer needed, above the diagonal, stands T^T, so that all is one square."""

from __future__ import annotations

from ..common.hopper_tiles import (
    as_left,
    copy_rows,
    product_layout,
    row_layout,
    row_places,
    show_to_products,
    store_in_order,
    token_layout,
)
from ..common.math import is_bad, zero_where
from ..common.packing import program_segment
from ..runtime.gluon import async_copy, gl, gluon, mma_v2, warpgroup_mma, warpgroup_mma_wait
from .sums import round_to_tf32, split_first_bits

ROWS = gl.constexpr(16)  # of a block that is eliminated at once
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLOATS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def take_number(x, j: gl.constexpr):
    """Number j of a vector [1, 32], in all lanes."""
    return gl.gather(x, gl.full([1, 32], j, gl.int32, x.type.layout), 1)


@gluon.jit
def approximate_inverse(x):
    """The hardware's own, to about 2^-23."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def take_earlier_blocks(square, weights, b: gl.constexpr):
    """Columns of block b, less what they take from the blocks before it: in the rows from block b on p, above them T^T."""
    SMALL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, gl.num_warps() // 4], instr_shape=[16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SMALL, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SMALL, 1)
    own = square.slice(ROWS * b, ROWS).permute((1, 0))
    row = gl.arange(0, 64, gl.SliceLayout(1, SMALL)) // ROWS
    group = gl.arange(0, 64, gl.SliceLayout(1, LEFT)) // ROWS
    given = gl.where((row >= b)[:, None], own.load(SMALL), 0.0)
    taken = gl.zeros([64, ROWS], gl.float32, SMALL)
    rest, other_rest = taken, taken  # sums of their own, as a product waits for the one before it
    for c in gl.static_range(b):
        earlier = square.slice(ROWS * c, ROWS)
        left = earlier.permute((1, 0)).load(LEFT)
        left = gl.where(((group >= b) | (group <= c))[:, None], left, 0.0)
        weight = weights.slice(ROWS * c, ROWS).load(gl.SliceLayout(1, RIGHT))
        right = earlier.slice(ROWS * b, ROWS, dim=1).load(RIGHT) * weight[:, None]
        high_left, high_right = round_to_tf32(left), round_to_tf32(right)
        rest = mma_v2(left - high_left, high_right, rest, input_precision="tf32")
        other_rest = mma_v2(high_left, right - high_right, other_rest, input_precision="tf32")
        taken = mma_v2(high_left, high_right, taken, input_precision="tf32")
    own.store(given - (taken + (rest + other_rest)))


@gluon.jit
def eliminate_block(square, gains, found_d, found_w, b: gl.constexpr):
    """16 columns of `eliminate_in_place`, which are p and T^T here. found_d, found_w [1, 32]: of the half of the tokens that has
    the block."""
    LANES: gl.constexpr = found_d.type.layout
    HALF: gl.constexpr = b // 2
    AT: gl.constexpr = ROWS * (b % 2)
    halves = square._reinterpret(gl.float32, [64, 2, 32], PLAIN)
    lane = gl.arange(0, 32, gl.SliceLayout(0, LANES))[None, :]
    row = 32 * gl.arange(0, 2, gl.SliceLayout(1, LANES))[:, None] + lane
    left, rows = (), ()
    for j in gl.static_range(ROWS):
        column = halves.index(ROWS * b + j)
        left += (column.slice(HALF, 1).load(LANES),)
        identity = gl.where(row == ROWS * b + j, 1.0, 0.0)
        rows += (gl.where(row // ROWS == b, identity, column.load(LANES)),)
    pivot = take_number(left[0], AT)
    if gains is not None:
        gain = gains.slice(32 * HALF, 32).load(gl.SliceLayout(0, LANES))[None, :]
    done = ()
    for j in gl.static_range(ROWS):
        column, line = left[0], rows[0]
        weight = 1.0
        divisor = pivot
        if gains is not None:
            weight = take_number(gain, AT + j)
            divisor *= weight
        divisor = gl.maximum(divisor + 1.0, 1.0)
        weight = approximate_inverse(divisor) * weight
        found_d = gl.where(lane == AT + j, divisor, found_d)
        found_w = gl.where(lane == AT + j, weight, found_w)
        if j + 1 < ROWS:  # the next pivot without this column's part: it waits for no shuffle of what this step finds
            upcoming = take_number(left[1], AT + j + 1)
        left_after, rows_after = (), ()
        for k in gl.static_range(1, ROWS - j):
            number = take_number(column, AT + j + k)
            share = weight * number
            if k == 1:
                pivot = upcoming - share * number
            left_after += (left[k] - share * column,)
            rows_after += (rows[k] - share * line,)
        done += (line,)
        left, rows = left_after, rows_after
    for step in gl.static_range(4):  # the columns, joined from the highest bit of their number to the lowest
        joined = ()
        for k in gl.static_range(8 >> step):
            joined += (gl.join(done[k], done[k + (8 >> step)]),)
        done = joined
    square.slice(ROWS * b, ROWS).permute((1, 0)).store(done[0].reshape([64, ROWS]))
    return found_d, found_w


@gluon.jit
def eliminate_in_place(square, gains, divisors, weights):
    """T from p_ij = r_i.u_j of the tokens' start, as `eliminate_rows` has it, in the place of p (both transposed; what stands
    above the diagonal of T counts for nothing), with d and w [64]. gains [64], 1 when None. The lanes of one warp have 32 rows,
    those of another the others; the block's own rows all warps have."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, gl.num_warps() // 2], [1, 0])
    found_d = gl.full([1, 32], 1.0, gl.float32, LANES)
    found_w = gl.zeros([1, 32], gl.float32, LANES)
    for b in gl.static_range(64 // ROWS):
        if b > 0:
            take_earlier_blocks(square, weights, b)
        found_d, found_w = eliminate_block(square, gains, found_d, found_w, b)
        # Of the first block of a half 16 numbers that the second one replaces are stored as well.
        divisors.slice(32 * (b // 2), 32).store(found_d.reshape([32]))
        weights.slice(32 * (b // 2), 32).store(found_w.reshape([32]))


@gluon.jit
def times_tokens(x, b, LAYOUT: gl.constexpr):
    """x b with x in float32 as three bfloat16 numbers, and b [.., 64] in bfloat16 in shared memory."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    high, rest = split_first_bits(x)
    middle, rest = split_first_bits(rest)
    low, rest = split_first_bits(rest)
    high = gl.convert_layout(high, LEFT)
    middle = gl.convert_layout(middle, LEFT)
    low = gl.convert_layout(low, LEFT)
    out = gl.zeros([x.shape[0], 64], gl.float32, LAYOUT)
    out = warpgroup_mma(low, b, out, use_acc=False, is_async=True)
    out = warpgroup_mma(middle, b, out, is_async=True)
    out = warpgroup_mma(high, b, out, is_async=True)
    out, low, middle, high = warpgroup_mma_wait(0, deps=[out, low, middle, high])
    return out


@gluon.jit
def times_floats(x, rests, highs, LAYOUT: gl.constexpr):
    """x b^T in the precision of float32: x [rows, 64] in registers, and b [columns, 64] as two numbers of tf32 in shared memory,
    stored by `store_in_order`."""
    high = round_to_tf32(x)
    rest = as_left(x - high)
    high = as_left(high)
    COLUMNS: gl.constexpr = highs.shape[0]
    out = gl.zeros([x.shape[0], COLUMNS], gl.float32, LAYOUT)
    out = warpgroup_mma(rest, highs.permute((1, 0)), out, use_acc=False, is_async=True)
    out = warpgroup_mma(high, rests.permute((1, 0)), out, is_async=True)
    out = warpgroup_mma(high, highs.permute((1, 0)), out, is_async=True)
    out, rest, high = warpgroup_mma_wait(0, deps=[out, rest, high])
    return out


@gluon.jit
def store_columns(x, to, live, STRIDE: gl.constexpr):
    """Write columns of x [K, 64], a product's result, before `live` as rows of a tensor. A thread's places differ by constants,
    which stand within instructions."""
    c = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    t = gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))
    apart = (t // 8 * 8 + t % 2).to(gl.int64)[None, :] * STRIDE + (c % 16 // 8 * 8).to(gl.int64)[:, None]
    own = (t % 8 - t % 2).to(gl.int64)[None, :] * STRIDE + (c - c % 16 // 8 * 8).to(gl.int64)[:, None]
    gl.store(to + own + apart, x.to(to.dtype.element_ty), (t < live)[None, :])


@gluon.jit
def store_as_two(highs, rests, x):
    high = round_to_tf32(x)
    store_in_order(highs, high)
    store_in_order(rests, x - high)


@gluon.jit(do_not_specialize=["time"])
def solve_in_turn(
    u, gain, A, R, D, y, segments, time,
    HV: gl.constexpr, K: gl.constexpr, LENGTH: gl.constexpr, HEADS: gl.constexpr, HEADS_GAIN: gl.constexpr,
):  # fmt: skip
    """Arguments as of `solve_segment`."""
    WARPS: gl.constexpr = gl.num_warps()
    WHOLE: gl.constexpr = product_layout(WARPS, K, 8)
    TALL: gl.constexpr = product_layout(WARPS, 64, 16)
    TALL_FLOATS: gl.constexpr = product_layout(WARPS, 64, 8)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    READ: gl.constexpr = row_layout(WARPS, K)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TALL_FLOATS)
    U_ROW: gl.constexpr = HV // HEADS * K
    p, head, first, count, chunk = program_segment(segments, time, LENGTH)
    chunk = gl.where(count > 0, chunk, 0)  # of a number that no segment has it may be any
    tokens = gl.allocate_shared_memory(
        gl.bfloat16, [2, 64, K], gl.NVMMASharedLayout.get_default_for([64, K], gl.bfloat16)
    )
    square = gl.allocate_shared_memory(gl.float32, [64, 64], PLAIN)
    lines = gl.allocate_shared_memory(gl.float32, [4 * 64], LINE)  # a power of two
    gains, divisors, weights = lines.slice(0, 64), lines.slice(64, 64), lines.slice(128, 64)
    u += (first * (HV // HEADS) + head // HEADS) * K
    copy_rows(tokens.index(0), u, count, U_ROW, True)
    async_copy.commit_group()
    r = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
    at = r * K + c
    now = gl.load(A + (chunk * HV + head) * (K * K) + at)
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
        gl.store(A + number * (K * K) + at, now)

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

        rows = times_tokens(now, U.permute((1, 0)), TALL)
        parts = gl.allocate_shared_memory(
            gl.bfloat16, [3, K, 64], gl.NVMMASharedLayout.get_default_for([K, 64], gl.bfloat16)
        )
        high, rest = split_first_bits(rows)
        middle, rest = split_first_bits(rest)
        low_bits, rest = split_first_bits(rest)
        parts.index(0).store(high)
        parts.index(1).store(middle)
        parts.index(2).store(low_bits)
        show_to_products()
        nothing = gl.zeros([64, 64], gl.float32, SQUARE)
        products = warpgroup_mma(U, parts.index(2), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma(U, parts.index(1), products, is_async=True)
        products = warpgroup_mma(U, parts.index(0), products, is_async=True)
        products = warpgroup_mma_wait(0, deps=[products])
        square.store(products)

        eliminate_in_place(square, gains if gain is not None else None, divisors, weights)

        i = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None]
        j = gl.arange(0, 64, gl.SliceLayout(0, LINES))[None, :]
        lower = gl.where(i >= j, square.load(LINES), 0.0)
        factors = gl.allocate_shared_memory(gl.float32, [2, 64, 64], FLOATS)
        store_as_two(factors.index(0), factors.index(1), lower)
        gl.store(D + token * HV + head + t * HV, divisors.load(BY_TOKEN), t < left)
        show_to_products()
        found = times_floats(
            gl.convert_layout(rows, TALL_FLOATS, assert_trivial=True), factors.index(1), factors.index(0), TALL_FLOATS
        )
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
        now -= times_floats(found, halves.index(1), halves.index(0), WHOLE)
        now += gl.where(spoils, float("nan"), 0.0)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["time"])
def gradients_in_turn(
    u, gain, x, y, D, H, dy, du, dgain, db, segments, time,
    HV: gl.constexpr, K: gl.constexpr, LENGTH: gl.constexpr, HEADS: gl.constexpr, HEADS_GAIN: gl.constexpr,
    SELF: gl.constexpr,
):  # fmt: skip
    """Arguments as of `segment_gradients`. H stays in registers: as a sum of two bfloat16 numbers per number the left operand
    of a product with the keys, and what the tokens of a chunk add to it goes there as well."""
    p, head, first, count, _ = program_segment(segments, time, LENGTH)
    if count == 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    TYPE: gl.constexpr = gl.bfloat16
    WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
    TALL: gl.constexpr = product_layout(WARPS, 64, 16)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TALL, 2)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TALL)
    U_ROW: gl.constexpr = HV // HEADS * K
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    tokens = gl.allocate_shared_memory(TYPE, [2, 64, K], TILE)
    adjoints = gl.allocate_shared_memory(TYPE, [2, 64, K], TILE)
    Y = gl.allocate_shared_memory(TYPE, [64, K], TILE)
    scores = gl.allocate_shared_memory(TYPE, [2, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], TYPE))
    chunks = (count + 63) // 64
    start, left = first + (chunks - 1) * 64, count - (chunks - 1) * 64
    u += (start * (HV // HEADS) + head // HEADS) * K
    copy_rows(tokens.index(0), u, left, U_ROW, True)
    copy_rows(adjoints.index(0), x + (start * HV + head) * K, left, HV * K, True)
    async_copy.commit_group()
    r = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
    now = gl.load(H + (p.to(gl.int64) * HV + head) * (K * K) + r * K + c)
    row, at = row_places(HV * K, 64, K)
    IN_ROWS: gl.constexpr = gl.SliceLayout(1, at.type.layout)
    t = gl.arange(0, 64, IN_ROWS)
    given = gl.load(y + (start * HV + head) * K + at, (row < left)[:, None], 0.0)
    if SELF:
        down = gl.load(dy + (start * HV + head) * K + at, (row < left)[:, None], 0.0)
        divisor = gl.load(D + start * HV + head + t * HV, t < left, 1.0)
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    for step in range(0, chunks):
        U, X = tokens.index(step % 2), adjoints.index(step % 2)
        if SELF:
            own = gl.convert_layout(gl.sum(given * down.to(gl.float32), 1) / divisor, COLUMN)
            Y.store((given * (1.0 / divisor)[:, None]).to(TYPE))
        else:
            Y.store(given.to(TYPE))
        async_copy.wait_group(0)
        show_to_products()
        at_tokens = (start * HV + head) * K
        ahead = gl.where(step + 1 < chunks, 64, 0)
        u -= 64 * U_ROW
        copy_rows(tokens.index((step + 1) % 2), u, ahead, U_ROW, True)
        copy_rows(adjoints.index((step + 1) % 2), x + at_tokens - 64 * HV * K, ahead, HV * K, True)
        async_copy.commit_group()
        given = gl.load(y + at_tokens - 64 * HV * K + at, (row < ahead)[:, None], 0.0)
        if SELF:
            down = gl.load(dy + at_tokens - 64 * HV * K + at, (row < ahead)[:, None], 0.0)
            divisor = gl.load(D + (start - 64) * HV + head + t * HV, t < ahead, 1.0)
        high, rest = split_first_bits(now)
        high, rest = gl.convert_layout(high, LEFT), gl.convert_layout(rest.to(TYPE), LEFT)
        out = gl.zeros([K, 64], gl.float32, TALL)
        along_x = warpgroup_mma(X, U.permute((1, 0)), none, use_acc=False, is_async=True)
        along_y = warpgroup_mma(Y, U.permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(rest, U.permute((1, 0)), out, use_acc=False, is_async=True)
        out = warpgroup_mma(high, U.permute((1, 0)), out, is_async=True)
        out, rest, high, along_x, along_y = warpgroup_mma_wait(0, deps=[out, rest, high, along_x, along_y])
        now = warpgroup_mma(X.permute((1, 0)), Y, now, is_async=True)
        now = warpgroup_mma(Y.permute((1, 0)), X, now, is_async=True)
        scores.index(0).store(gl.where(i >= j, along_x, 0.0).to(TYPE))
        scores.index(1).store(gl.where(i >= j, along_y, 0.0).to(TYPE))
        show_to_products()
        out = warpgroup_mma(Y.permute((1, 0)), scores.index(0), out, is_async=True)
        out = warpgroup_mma(X.permute((1, 0)), scores.index(1), out, is_async=True)
        now, out = warpgroup_mma_wait(0, deps=[now, out])
        out = -out
        column = gl.arange(0, 64, COLUMN)
        if gain is not None:
            grad = 0.5 * gl.sum(U.permute((1, 0)).load(TALL).to(gl.float32) * out, 0)
            if SELF:
                grad += own
            gl.store(dgain + start * HV + head + column * HV, grad, column < left)
            gates = gain + start * (HV // HEADS_GAIN) + head // HEADS_GAIN
            gate = gl.load(gates + column * (HV // HEADS_GAIN), column < left, 0.0)
            out *= gate.to(gl.float32)[None, :]
        if SELF:
            out += X.permute((1, 0)).load(TALL).to(gl.float32)
        elif db is not None:
            store_columns(X.permute((1, 0)).load(TALL), db + at_tokens, left, HV * K)
        store_columns(out, du + at_tokens, left, HV * K)
        gl.thread_barrier()  # no warp reads this chunk's tiles any more
        start -= 64
        left = 64
    async_copy.wait_group(0)
