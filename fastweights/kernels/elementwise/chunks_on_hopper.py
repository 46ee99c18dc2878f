"""Elementwise Longhorn in Gluon for Hopper GPUs, where a tile of the state is square. The derivation stands in
__init__.py.

The keys' channels and the tile's columns are the rows of one tile: a thread has one of them, and the products of its factors in
registers. They go to shared memory as rows of 64 numbers, from which all products of a block read their operands. The gradient of
the state stays in registers, as the sum of a product: each warp has 16 columns of values.
"""

from __future__ import annotations

from ..common.hopper_tiles import copy_rows, row_layout, row_places
from ..common.math import infinite_to_nan, is_bad, reciprocal, to_float_or_nan
from ..common.packing import chunk_place, program_part
from ..common.tiles import token_address
from ..runtime.gluon import async_copy, gl, gluon, mma_v2
from .blocks import (
    SHORTEST,
    factor_gradients,
    read_products,
    read_results,
    stack,
    subset_products,
    unstack,
    without_empty,
    write_products,
    write_results,
)

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
WIDE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # of rows of 128 bytes or more in shared memory
MIDDLE = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))  # of 64 bytes
NARROW = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))  # of 32 bytes
FOUND_WIDE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # of 32 numbers in float32
FOUND_NARROW = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))  # of 16


@gluon.constexpr_function
def sum_layout(warps):
    """Of the result of a product, 16 rows per warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def inner_layout(warps):
    """Of the result [32, 16] of a product."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, warps // 2], instr_shape=[16, 8])


@gluon.jit
def add_four(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, c + other_c, d + other_d


@gluon.jit
def find_rows(
    q, k, v, beta, do, first, tile, head, HV, K: gl.constexpr, C: gl.constexpr, V: gl.constexpr,
    HEADS_K: gl.constexpr, HEADS_BETA: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Of the rows [2 C] of a tile, keys' channels and then columns of values: where what they write and read lies at the chunk's
    first token, and how far the next one is; the same of the gains; their channel or column in the tile, and which rows there
    are of keys and of values."""
    row = gl.arange(0, 2 * C, VECTOR)
    is_key = row < C
    place = gl.where(is_key, row, row - C)
    key_stride, beta_stride = HV // HEADS_K * K, HV // HEADS_BETA * V
    at_key = first * key_stride + head // HEADS_K * K + place
    at_value = first * (HV * V) + head * V + tile * C + place
    stride = gl.where(is_key, key_stride, HV * V)
    written_from = gl.where(is_key, k + at_key, v + at_value)
    read_from = gl.where(is_key, q + at_key, v + at_value if do is None else do + at_value)
    beta_from = beta + (first * beta_stride + head // HEADS_BETA * V + tile * C + place)
    of_keys, of_values = is_key & (place < K), (row >= C) & (tile * C + place < V)
    return written_from, read_from, stride, beta_from, beta_stride, place, of_keys, of_values


@gluon.jit
def load_four_rows(places, stride, b, count, there):
    """Of block b's four tokens the numbers of all rows as they lie in memory, 0 from token `count` on."""
    out = ()
    for r in gl.static_range(4):
        out = out + (gl.load(places + (b * 4 + r) * stride, there & (b * 4 + r < count), 0.0),)
    return out


@gluon.jit
def write_lengths(to, k, first, count, head, HV, K: gl.constexpr, HEADS_K: gl.constexpr, C: gl.constexpr):
    """L of a chunk's tokens, by blocks [16, 4]."""
    LAYOUT: gl.constexpr = row_layout(gl.num_warps(), C)
    token, channel = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
    places = token_address(k, first, head, HV, HEADS_K, K) + token[:, None] * (HV // HEADS_K * K) + channel[None, :]
    keys = to_float_or_nan(gl.load(places, (token < count)[:, None] & (channel < K)[None, :], 0.0))
    to.store(gl.sum(keys * keys, 1).reshape([16, 4]))


@gluon.jit
def block_lengths(lengths, b, ROWS: gl.constexpr, VECTOR: gl.constexpr):
    """L of block b's tokens, each for every row."""
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    own = lengths._reinterpret(gl.float32, [16, 1, 4], PLAIN).index(b).load(FOUR)
    same = gl.zeros([ROWS, 4], gl.float32, FOUR) + own
    even, odd = gl.split(same.reshape([ROWS, 2, 2]))
    zeroth, second = gl.split(even)
    first, third = gl.split(odd)
    numbers, out = (zeroth, first, second, third), ()
    for r in gl.static_range(4):
        out = out + (gl.convert_layout(numbers[r], VECTOR, assert_trivial=True),)
    return out


@gluon.jit
def block_vectors(raw, raw_beta, lengths, of_keys, PRECISION: gl.constexpr):
    """Of the rows of a block, those of keys and those of values: k or v; 1 / L or 0; least and e, of values; k or u; the products
    of their factors."""
    inputs, inverse, least, e, written, factors = (), (), (), (), (), ()
    for r in gl.static_range(4):
        x, gain = to_float_or_nan(raw[r]), to_float_or_nan(raw_beta[r])
        by = gl.where(lengths[r] < SHORTEST, 0.0, reciprocal(lengths[r], PRECISION))
        kept = reciprocal(1 + gain * lengths[r], PRECISION)
        rate = gain * kept
        inputs, inverse, least, e = inputs + (x,), inverse + (by,), least + (kept,), e + (rate,)
        written = written + (gl.where(of_keys, x, rate * x),)
        factors = factors + (gl.where(of_keys, -(x * x) * by, rate * lengths[r]),)
    return inputs, inverse, least, e, written, subset_products(factors)


@gluon.jit
def read_vectors(raw, of_keys, scale):
    """What the tokens of a block read with: the scaled query, and the gradient of the output."""
    out = ()
    for t in gl.static_range(4):
        out = out + (to_float_or_nan(raw[t]) * gl.where(of_keys, scale, 1.0),)
    return out


@gluon.jit
def state_places(number, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Where state `number` (int64) lies in a tensor [.., C, C]."""
    row, column = gl.arange(0, C, gl.SliceLayout(1, LAYOUT)), gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
    return number * (C * C) + row[:, None] * C + column[None, :]


@gluon.jit
def side(buffer, SIDE: gl.constexpr):
    """The rows of keys (0) or values (1)."""
    C: gl.constexpr = buffer.shape[0] // 2
    return buffer.slice(SIDE * C, C)


@gluon.jit
def store_terms(writes, factors, written, products):
    """What a block's tokens write, and the products of their decays, for matrix products."""
    writes.store(stack(write_products(written, products), 16, writes.dtype))
    factors.store(stack(without_empty(products), 16, factors.dtype))


@gluon.jit
def decay_less_one(factors, LAYOUT: gl.constexpr):
    """By what a block multiplies every element [values, keys], minus one."""
    C: gl.constexpr = factors.shape[0] // 2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    rows, columns = side(factors, 1).load(LEFT), side(factors, 0).permute((1, 0)).load(RIGHT)
    return mma_v2(rows, columns, gl.zeros([C, C], gl.float32, LAYOUT))


@gluon.jit
def add_product(S, terms):
    """The state plus a product of the rows of values and those of keys."""
    SUMS: gl.constexpr = sum_layout(gl.num_warps())
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    return mma_v2(side(terms, 1).load(LEFT), side(terms, 0).permute((1, 0)).load(RIGHT), S)


@gluon.jit
def elementwise_product(a, b):
    """Of numbers of 16 bits, two at a time."""
    CODE: gl.constexpr = "mul.rn.bf16x2 $0, $1, $2;" if a.dtype == gl.bfloat16 else "mul.rn.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(CODE, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit
def write_inner(to, reads, writes, SIDE: gl.constexpr):
    """What every read's product [32] takes of every write [16] along over the channels of a side. The four writes stand where
    `write_products` has the empty subset: token s at 16 - 2^(4 - s)."""
    INNER: gl.constexpr = inner_layout(gl.num_warps())
    LEFT: gl.constexpr = gl.DotOperandLayout(0, INNER, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, INNER, 2)
    left, right = side(reads, SIDE).permute((1, 0)).load(LEFT), side(writes, SIDE).load(RIGHT)
    inner = mma_v2(left, right, gl.zeros([32, 16], gl.float32, INNER))
    number, place = gl.arange(0, 32, gl.SliceLayout(1, INNER)), gl.arange(0, 16, gl.SliceLayout(0, INNER))
    after = gl.where(place == 0, 2, gl.where(place == 8, 4, gl.where(place == 12, 8, gl.where(place == 14, 16, 64))))
    seen = ((number[:, None] & (after[None, :] - 1)) == 0) & (number[:, None] >= after[None, :])
    to.store(gl.where(seen, inner, 0.0).to(to.dtype))


@gluon.jit
def side_products(before, after, reads, writes, factors, inner, found, SIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """What `differentiate_side` finds by products, for rows of a side, into `found`: of reads [2 C, 32], of writes and of factors
    [2 C, 16]. before, after: the state and its gradient, with the side's rows. inner: of the other side."""
    OTHER: gl.constexpr = 1 - SIDE
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    C: gl.constexpr = before.shape[0]
    S, dS = before.load(LEFT), after.load(LEFT)
    none = gl.zeros([C, 16], gl.float32, LAYOUT)
    of_reads = mma_v2(S, side(reads, OTHER).load(RIGHT), gl.zeros([C, 32], gl.float32, LAYOUT))
    of_writes = mma_v2(dS, side(writes, OTHER).load(RIGHT), none)
    of_all = mma_v2(elementwise_product(S, dS), side(factors, OTHER).load(RIGHT), none)
    of_reads = mma_v2(side(writes, SIDE).load(LEFT), inner.permute((1, 0)).load(RIGHT), of_reads)
    of_writes = mma_v2(side(reads, SIDE).load(LEFT), inner.load(RIGHT), of_writes)
    side(found[0], SIDE).store(of_reads)
    side(found[1], SIDE).store(of_writes)
    side(found[2], SIDE).store(of_all)


@gluon.jit
def row_vectors(buffer, VECTOR: gl.constexpr):
    """The columns of a tile in shared memory."""
    COUNT: gl.constexpr = buffer.shape[1]
    parts, out = unstack(buffer.load(gl.BlockedLayout([1, COUNT], [32, 1], [gl.num_warps(), 1], [1, 0])), COUNT), ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], VECTOR, assert_trivial=True),)
    return out


@gluon.jit(do_not_specialize=["T"])
def summarize_square_tile(
    q, k, v, beta, do, added, kept, chunks, T, scale, HV,
    K: gl.constexpr, PK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    HEADS_K: gl.constexpr, HEADS_BETA: gl.constexpr, BACK: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """`summarize_elements` for square tiles: what a chunk adds and by what it multiplies, in one program."""
    TILES: gl.constexpr = (V + BV - 1) // BV
    C: gl.constexpr = PK
    SUMS: gl.constexpr = sum_layout(gl.num_warps())
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile, m, head, first, count = program_part(chunks, T, TILES)
    if count <= 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    block_L = gl.allocate_shared_memory(gl.float32, [16, 4], PLAIN)
    factors = gl.allocate_shared_memory(dtype, [2 * C, 16], NARROW)
    if BACK:
        terms = gl.allocate_shared_memory(dtype, [2 * C, 32], MIDDLE)
    else:
        terms = gl.allocate_shared_memory(dtype, [2 * C, 16], NARROW)
    written_from, read_from, stride, beta_from, beta_stride, place, of_keys, of_values = find_rows(
        q, k, v, beta, do, first, tile, head, HV, K, C, V, HEADS_K, HEADS_BETA, VECTOR
    )
    wanted = of_keys if BACK else of_keys | of_values
    write_lengths(block_L, k, first, count, head, HV, K, HEADS_K, C)
    blocks = gl.cdiv(count, 4)
    S = gl.zeros([C, C], gl.float32, SUMS)
    product = gl.full([C, C], 1.0, gl.float32, SUMS)
    b = blocks - 1 if BACK else 0
    raw = load_four_rows(written_from, stride, b, count, wanted)
    raw_beta = load_four_rows(beta_from, beta_stride, b, count, of_values)
    raw_read = load_four_rows(read_from, stride, b, count, of_keys | of_values) if BACK else raw
    for _ in range(0, blocks):
        lengths = block_lengths(block_L, b, 2 * C, VECTOR)
        b = gl.maximum(b - 1, 0) if BACK else gl.minimum(b + 1, blocks - 1)
        vectors = block_vectors(raw, raw_beta, lengths, of_keys, PRECISION)
        written, products = vectors[4], vectors[5]
        raw = load_four_rows(written_from, stride, b, count, wanted)
        raw_beta = load_four_rows(beta_from, beta_stride, b, count, of_values)
        factors.store(stack(without_empty(products), 16, dtype))
        if BACK:
            read = read_vectors(raw_read, of_keys, scale)
            raw_read = load_four_rows(read_from, stride, b, count, of_keys | of_values)
            terms.store(stack(read_products(read, products), 32, dtype))
        else:
            terms.store(stack(write_products(written, products), 16, dtype))
        change = decay_less_one(factors, SUMS)
        product += product * change
        S = add_product(S + S * change, terms)
    to = state_places(((m.to(gl.int64) * HV + head) * TILES + tile), C, SUMS)
    gl.store(added + to, S)
    gl.store(kept + to, product)


@gluon.jit(do_not_specialize=["T"])
def read_square_tile(
    q, k, v, beta, starts, o, chunks, T, scale, HV,
    K: gl.constexpr, PK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    HEADS_K: gl.constexpr, HEADS_BETA: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """`read_chunk` for square tiles."""
    TILES: gl.constexpr = (V + BV - 1) // BV
    C: gl.constexpr = PK
    SUMS: gl.constexpr = sum_layout(gl.num_warps())
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile, m, head, first, count = program_part(chunks, T, TILES)
    if count <= 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    block_L = gl.allocate_shared_memory(gl.float32, [16, 4], PLAIN)
    reads = gl.allocate_shared_memory(dtype, [2 * C, 32], MIDDLE)
    writes = gl.allocate_shared_memory(dtype, [2 * C, 16], NARROW)
    factors = gl.allocate_shared_memory(dtype, [2 * C, 16], NARROW)
    inner = gl.allocate_shared_memory(dtype, [32, 16], NARROW)
    found = gl.allocate_shared_memory(gl.float32, [2 * C, 32], FOUND_WIDE)
    written_from, read_from, stride, beta_from, beta_stride, place, of_keys, of_values = find_rows(
        q, k, v, beta, None, first, tile, head, HV, K, C, V, HEADS_K, HEADS_BETA, VECTOR
    )
    there = of_keys | of_values
    o_to = o + (first * (HV * V) + head * V + tile * C + place)
    write_lengths(block_L, k, first, count, head, HV, K, HEADS_K, C)
    blocks = gl.cdiv(count, 4)
    S = gl.load(starts + state_places((m.to(gl.int64) * HV + head) * TILES + tile, C, SUMS)).to(gl.float32)
    raw = load_four_rows(written_from, stride, 0, count, there)
    raw_read = load_four_rows(read_from, stride, 0, count, of_keys)
    raw_beta = load_four_rows(beta_from, beta_stride, 0, count, of_values)
    for b in range(0, blocks):
        later = gl.minimum(b + 1, blocks - 1)
        vectors = block_vectors(raw, raw_beta, block_lengths(block_L, b, 2 * C, VECTOR), of_keys, PRECISION)
        written, products = vectors[4], vectors[5]
        raw = load_four_rows(written_from, stride, later, count, there)
        raw_beta = load_four_rows(beta_from, beta_stride, later, count, of_values)
        read = read_vectors(raw_read, of_keys, scale)
        raw_read = load_four_rows(read_from, stride, later, count, of_keys)
        reads.store(stack(read_products(read, products), 32, dtype))
        store_terms(writes, factors, written, products)
        write_inner(inner, reads, writes, 0)
        answers = mma_v2(
            gl.convert_layout(S.to(dtype), LEFT, assert_trivial=True), side(reads, 0).load(RIGHT),
            gl.zeros([C, 32], gl.float32, SUMS),
        )  # fmt: skip
        # A product would hand bad numbers to earlier tokens: they enter it as 0, and marks follow from their token on.
        clean = side(writes, 1).load(LEFT)
        clean = gl.where(is_bad(clean), 0.0, clean.to(gl.float32)).to(dtype)
        side(found, 1).store(mma_v2(clean, inner.permute((1, 0)).load(RIGHT), answers))
        S = add_product(S + S * decay_less_one(factors, SUMS), writes)
        outputs, mark = read_results(products, row_vectors(found, VECTOR)), 0.0
        for t in gl.static_range(4):
            mark += gl.where(is_bad(written[t].to(dtype)), float("nan"), 0.0)
            answer = infinite_to_nan(outputs[t] + mark).to(o.dtype.element_ty)
            gl.store(o_to + (b * 4 + t) * (HV * V), answer, of_values & (b * 4 + t < count))


@gluon.jit(do_not_specialize=["T", "tokens", "items"])
def differentiate_square_tile(
    q, k, v, beta, starts, ends, do, scratch, dq, dk, dv, dbeta, chunks, T, tokens, items, scale, HV,
    K: gl.constexpr, PK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    HEADS_K: gl.constexpr, HEADS_BETA: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """`differentiate_chunk` for square tiles, with one loop for both sides. scratch [programs, 16, BV, PK]: the states before a
    chunk's blocks."""
    TILES: gl.constexpr = (V + BV - 1) // BV
    C: gl.constexpr = PK
    dtype: gl.constexpr = k.dtype.element_ty
    SUMS: gl.constexpr = sum_layout(gl.num_warps())
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    block_L = gl.allocate_shared_memory(gl.float32, [16, 4], PLAIN)
    before = gl.allocate_shared_memory(dtype, [2, C, C], WIDE)
    after = gl.allocate_shared_memory(dtype, [C, C], WIDE)
    reads = gl.allocate_shared_memory(dtype, [2 * C, 32], MIDDLE)
    writes = gl.allocate_shared_memory(dtype, [2 * C, 16], NARROW)
    factors = gl.allocate_shared_memory(dtype, [2 * C, 16], NARROW)
    inner_keys = gl.allocate_shared_memory(dtype, [32, 16], NARROW)
    inner_values = gl.allocate_shared_memory(dtype, [32, 16], NARROW)
    found = (
        gl.allocate_shared_memory(gl.float32, [2 * C, 32], FOUND_WIDE),
        gl.allocate_shared_memory(gl.float32, [2 * C, 16], FOUND_NARROW),
        gl.allocate_shared_memory(gl.float32, [2 * C, 16], FOUND_NARROW),
    )
    in_state = row_places(C, C, C)[1]
    scratch += gl.program_id(0).to(gl.int64) * (16 * C * C)
    for step in range(0, gl.cdiv(items - gl.program_id(0), gl.num_programs(0))):
        item = gl.program_id(0) + step * gl.num_programs(0)
        tile, head, m = item % TILES, item // TILES % HV, item // TILES // HV
        first, count = chunk_place(chunks, m, T)
        blocks = gl.cdiv(count, 4)
        written_from, read_from, stride, beta_from, beta_stride, place, of_keys, of_values = find_rows(
            q, k, v, beta, do, first, tile, head, HV, K, C, V, HEADS_K, HEADS_BETA, VECTOR
        )
        there = of_keys | of_values
        value_to = first * (HV * V) + head * V + tile * C + place
        key_to = (tile.to(gl.int64) * tokens + first) * (HV * K) + head * K + place
        at = state_places((m.to(gl.int64) * HV + head) * TILES + tile, C, SUMS)
        if count > 0:
            write_lengths(block_L, k, first, count, head, HV, K, HEADS_K, C)
            S = gl.load(starts + at).to(gl.float32)
            raw = load_four_rows(written_from, stride, 0, count, there)
            raw_beta = load_four_rows(beta_from, beta_stride, 0, count, of_values)
            for b in range(0, blocks):
                vectors = block_vectors(raw, raw_beta, block_lengths(block_L, b, 2 * C, VECTOR), of_keys, PRECISION)
                written, products = vectors[4], vectors[5]
                later = gl.minimum(b + 1, blocks - 1)
                raw = load_four_rows(written_from, stride, later, count, there)
                raw_beta = load_four_rows(beta_from, beta_stride, later, count, of_values)
                after.store(S.to(dtype))
                store_terms(writes, factors, written, products)
                gl.store(scratch + b * (C * C) + in_state, after.load(row_layout(gl.num_warps(), C)))
                S = add_product(S + S * decay_less_one(factors, SUMS), writes)

            gl.thread_barrier()
            dS = gl.load(ends + at).to(gl.float32)
            copy_rows(before.index(0), scratch + (blocks - 1) * (C * C), 0, C, False)
            async_copy.commit_group()
            raw = load_four_rows(written_from, stride, blocks - 1, count, there)
            raw_read = load_four_rows(read_from, stride, blocks - 1, count, there)
            raw_beta = load_four_rows(beta_from, beta_stride, blocks - 1, count, of_values)
            for i in range(0, blocks):
                b = blocks - 1 - i
                earlier = gl.maximum(b - 1, 0)
                state = before.index(i & 1)
                async_copy.wait_group(0)
                after.store(dS.to(dtype))
                lengths = block_lengths(block_L, b, 2 * C, VECTOR)
                inputs, inverse, least, e, written, products = block_vectors(raw, raw_beta, lengths, of_keys, PRECISION)
                raw = load_four_rows(written_from, stride, earlier, count, there)
                raw_beta = load_four_rows(beta_from, beta_stride, earlier, count, of_values)
                read = read_vectors(raw_read, of_keys, scale)
                raw_read = load_four_rows(read_from, stride, earlier, count, there)
                reads.store(stack(read_products(read, products), 32, dtype))
                store_terms(writes, factors, written, products)
                write_inner(inner_keys, reads, writes, 0)
                write_inner(inner_values, reads, writes, 1)
                copy_rows(before.index((i + 1) & 1), scratch + earlier * (C * C), 0, C, False)
                async_copy.commit_group()
                turned, turned_after = state.permute((1, 0)), after.permute((1, 0))
                side_products(turned, turned_after, reads, writes, factors, inner_values, found, 0, SUMS)
                side_products(state, after, reads, writes, factors, inner_keys, found, 1, SUMS)
                dS = add_product(dS + dS * decay_less_one(factors, SUMS), reads)

                of_reads, of_writes = row_vectors(found[0], VECTOR), row_vectors(found[1], VECTOR)
                of_all = row_vectors(found[2], VECTOR)
                d_read = read_results(products, of_reads)
                d_written = write_results(products, of_writes, (0.0, 0.0, 0.0, 0.0))
                d_factor = factor_gradients(products, read, written, of_all, of_reads, of_writes)
                parts, d_gain = (), ()
                for t in gl.static_range(4):
                    de = lengths[t] * d_factor[t] + inputs[t] * d_written[t]
                    parts = parts + (gl.where(of_keys, 0.0, e[t] * (e[t] * de)),)
                    d_gain = d_gain + (least[t] * (least[t] * de),)
                minus_dL = gl.reduce(parts, 0, add_four)
                for t in gl.static_range(4):
                    live = b * 4 + t < count
                    key_at, value_at = key_to + (b * 4 + t) * (HV * K), value_to + (b * 4 + t) * (HV * V)
                    d_key = d_written[t] - 2 * inputs[t] * (d_factor[t] * inverse[t] + minus_dL[t])
                    d_query, d_value = infinite_to_nan(d_read[t] * scale), infinite_to_nan(e[t] * d_written[t])
                    gl.store(dq + key_at, d_query.to(dq.dtype.element_ty), of_keys & live)
                    gl.store(dk + key_at, infinite_to_nan(d_key).to(dk.dtype.element_ty), of_keys & live)
                    gl.store(dv + value_at, d_value.to(dv.dtype.element_ty), of_values & live)
                    gl.store(dbeta + value_at, infinite_to_nan(d_gain[t]).to(dbeta.dtype.element_ty), of_values & live)
