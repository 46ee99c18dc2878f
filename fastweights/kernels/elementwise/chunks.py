"""Elementwise Longhorn chunk by chunk, four tokens at a time by matrix products. The derivation stands in __init__.py.

A program holds S^T [BV, PK] of a chunk and tile of columns in registers. Matrices of chunks that later launches read lie as they
are held, [M, HV, TILES, BV, PK].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import infinite_to_nan, to_float_or_nan
from ..common.packing import chunk_place, pieces_of_sequence, program_part
from ..common.tiles import token_address
from .blocks import (
    apart_bad,
    factor_gradients,
    four_sums,
    key_side,
    load_four,
    read_products,
    read_results,
    scaled,
    sees_write,
    stack,
    stack_tokens,
    unstack,
    value_side,
    without_empty,
    write_products,
    write_results,
)


@triton.jit
def matrix_places(number, PK: tl.constexpr, BV: tl.constexpr):
    """Where matrix `number` (int64) lies in a tensor [.., BV, PK]."""
    return number * (BV * PK) + tl.arange(0, BV)[:, None] * PK + tl.arange(0, PK)[None, :]


@triton.jit
def turned_places(number, PK: tl.constexpr, BV: tl.constexpr):
    """The same, to be read as [PK, BV]."""
    return number * (BV * PK) + tl.arange(0, PK)[:, None] + tl.arange(0, BV)[None, :] * PK


@triton.jit
def halves(x):
    """The lower and the upper half of the columns of x."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@triton.jit
def decayed(S, row_products, column_products, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """The state [rows, columns] times the decays of a block, found as factors minus one; half of the columns at a time, which
    spares registers."""
    rows, columns = stack(without_empty(row_products), 16, dtype), stack(without_empty(column_products), 16, dtype)
    lower_columns, upper_columns = halves(tl.trans(columns))
    lower, upper = halves(S)
    lower += tl.dot(rows, lower_columns, input_precision=PRECISION) * lower
    upper += tl.dot(rows, upper_columns, input_precision=PRECISION) * upper
    return tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), S.shape)


@triton.jit
def add_writes(S, written, row_products, by, column_products, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """The state [rows, columns] after the block's writes, each as the later tokens decay it."""
    rows = stack(write_products(written, row_products), 16, dtype)
    columns = stack(write_products(by, column_products), 16, dtype)
    return tl.dot(rows, tl.trans(columns), S, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T"])
def summarize_elements(
    q, k, v, beta, do, added, kept, chunks, T, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each chunk makes of a state: kept * S + added, float32 [M, HV, TILES, BV, PK]. BACK: of the gradient of the state
    after it. Two programs per chunk, head and tile of columns: one goes from zeros, one from ones without writes."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    part, m, head, first, count = program_part(chunks, T, 2 * TILES)
    if count <= 0:
        return
    tile, writes = part % TILES, part < TILES
    dtype: tl.constexpr = k.dtype.element_ty
    channel, column = tl.arange(0, PK), tile * BV + tl.arange(0, BV)
    S = tl.full((BV, PK), 1.0, tl.float32) * tl.where(writes, 0.0, 1.0)
    blocks = tl.cdiv(count, 4)
    for i in range(0, blocks):
        b = blocks - 1 - i if BACK else i
        begin, left = first + b * 4, count - b * 4
        raw_v = load_four(v, begin, left, head, HV, column, 1, V)
        raw_beta = load_four(beta, begin, left, head, HV, column, HEADS_BETA, V)
        keys, inverse, lengths, X = key_side(load_four(k, begin, left, head, HV, channel, HEADS_K, K), PRECISION)
        values, least, e, u, Y = value_side(raw_v, raw_beta, lengths, PRECISION)
        S = decayed(S, Y, X, dtype, PRECISION)
        if writes:
            if BACK:
                queries = scaled(load_four(q, begin, left, head, HV, channel, HEADS_K, K), scale)
                grads = scaled(load_four(do, begin, left, head, HV, column, 1, V), 1.0)
                QX, DY = stack(read_products(queries, X), 32, dtype), stack(read_products(grads, Y), 32, dtype)
                S = tl.dot(DY, tl.trans(QX), S, input_precision=PRECISION)
            else:
                S = add_writes(S, u, Y, keys, X, dtype, PRECISION)
    at = matrix_places((m.to(tl.int64) * HV + head) * TILES + tile, PK, BV)
    tl.store((added if writes else kept) + at, S)


@triton.jit(do_not_specialize=["T"])
def join_elements(
    begin, added, kept, starts, end, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """S <- kept * S + added from chunk to chunk of a sequence (BACK: from the last). starts [M, HV, TILES, BV, PK]: the S that
    each chunk begins with. begin, end [N, HV, K, V] or None: S before and after. A program has BLOCK channels of a tile."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    PARTS: tl.constexpr = PK // BLOCK
    part, n, head = tl.program_id(0) % (PARTS * TILES), tl.program_id(0) // (PARTS * TILES), tl.program_id(1)
    tile = part // PARTS
    low, count = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
    c, j = part % PARTS * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BV)
    column = tile * BV + j
    own = (n.to(tl.int64) * HV + head) * (K * V) + c[None, :] * V + column[:, None]
    inside = (c < K)[None, :] & (column < V)[:, None]
    in_matrix = j[:, None] * PK + c[None, :]
    S = tl.zeros((BV, BLOCK), tl.float32) if begin is None else to_float_or_nan(tl.load(begin + own, inside, 0.0))
    for step in range(0, count):
        m = low + count - 1 - step if BACK else low + step
        at = ((m.to(tl.int64) * HV + head) * TILES + tile) * (BV * PK) + in_matrix
        factor, more = tl.load(kept + at), tl.load(added + at)
        tl.store(starts + at, S.to(starts.dtype.element_ty))
        S = factor * S + more
    if end is not None:
        tl.store(end + own, infinite_to_nan(S), inside)


@triton.jit(do_not_specialize=["T"])
def read_chunk(
    q, k, v, beta, starts, o, chunks, T, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk, from the state at its start."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, m, head, first, count = program_part(chunks, T, TILES)
    if count <= 0:
        return
    dtype: tl.constexpr = k.dtype.element_ty
    channel, column = tl.arange(0, PK), tile * BV + tl.arange(0, BV)
    at = matrix_places((m.to(tl.int64) * HV + head) * TILES + tile, PK, BV)
    S, seen = tl.load(starts + at).to(tl.float32), sees_write()
    for b in range(0, tl.cdiv(count, 4)):
        begin, left = first + b * 4, count - b * 4
        raw_v = load_four(v, begin, left, head, HV, column, 1, V)
        raw_beta = load_four(beta, begin, left, head, HV, column, HEADS_BETA, V)
        queries = scaled(load_four(q, begin, left, head, HV, channel, HEADS_K, K), scale)
        keys, inverse, lengths, X = key_side(load_four(k, begin, left, head, HV, channel, HEADS_K, K), PRECISION)
        values, least, e, u, Y = value_side(raw_v, raw_beta, lengths, PRECISION)
        QX = stack(read_products(queries, X), 32, dtype)
        inner = tl.dot(tl.trans(stack_tokens(keys, dtype)), QX, input_precision=PRECISION)
        found = tl.dot(S.to(dtype), QX, input_precision=PRECISION)
        inner = tl.where(seen, inner, 0.0).to(dtype)
        clean, marks = apart_bad(u)
        found = tl.dot(stack_tokens(clean, dtype), inner, found, input_precision=PRECISION)
        answers = read_results(Y, unstack(found, 32))
        for t in tl.static_range(4):
            to = token_address(o, begin + t, head, HV, 1, V) + column
            answer = infinite_to_nan(answers[t] + marks[t])
            tl.store(to, answer.to(o.dtype.element_ty), (column < V) & (t < left))
        S = decayed(S, Y, X, dtype, PRECISION)
        S = add_writes(S, u, Y, keys, X, dtype, PRECISION)


@triton.jit
def write_block_states(
    S, k, v, beta, scratch, first, count, head, channel, column, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every block of a chunk, from that at its start."""
    dtype: tl.constexpr = k.dtype.element_ty
    for b in range(0, tl.cdiv(count, 4)):
        begin, left = first + b * 4, count - b * 4
        tl.store(scratch + matrix_places(b, PK, BV), S.to(dtype))
        raw_v = load_four(v, begin, left, head, HV, column, 1, V)
        raw_beta = load_four(beta, begin, left, head, HV, column, HEADS_BETA, V)
        keys, inverse, lengths, X = key_side(load_four(k, begin, left, head, HV, channel, HEADS_K, K), PRECISION)
        values, least, e, u, Y = value_side(raw_v, raw_beta, lengths, PRECISION)
        S = decayed(S, Y, X, dtype, PRECISION)
        S = add_writes(S, u, Y, keys, X, dtype, PRECISION)
    tl.debug_barrier()


@triton.jit
def write_block_gradients(
    dS, q, k, v, beta, do, scratch, first, count, head, channel, column, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every block of a chunk, from that at its end."""
    dtype: tl.constexpr = k.dtype.element_ty
    for b in range(tl.cdiv(count, 4) - 1, -1, -1):
        begin, left = first + b * 4, count - b * 4
        tl.store(scratch + matrix_places(b, PK, BV), dS.to(dtype))
        raw_v = load_four(v, begin, left, head, HV, column, 1, V)
        raw_beta = load_four(beta, begin, left, head, HV, column, HEADS_BETA, V)
        grads = scaled(load_four(do, begin, left, head, HV, column, 1, V), 1.0)
        queries = scaled(load_four(q, begin, left, head, HV, channel, HEADS_K, K), scale)
        keys, inverse, lengths, X = key_side(load_four(k, begin, left, head, HV, channel, HEADS_K, K), PRECISION)
        values, least, e, u, Y = value_side(raw_v, raw_beta, lengths, PRECISION)
        dS = decayed(dS, Y, X, dtype, PRECISION)
        QX, DY = stack(read_products(queries, X), 32, dtype), stack(read_products(grads, Y), 32, dtype)
        dS = tl.dot(DY, tl.trans(QX), dS, input_precision=PRECISION)
    tl.debug_barrier()


@triton.jit
def differentiate_side(before, after, rows, columns, seen, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """The gradients of the rows' side of a block: of what its tokens read and write, and of their factors. before, after: where
    the state before the block and the gradient of that after it lie, [rows, columns]. A side: what the tokens read and write, and
    the products of their factors."""
    read, written, products = rows
    column_read, column_written, column_products = columns
    S = tl.load(before)
    column_reads = stack(read_products(column_read, column_products), 32, dtype)
    of_reads = tl.dot(S, column_reads, input_precision=PRECISION)
    dS = tl.load(after)
    column_writes = stack(write_products(column_written, column_products), 16, dtype)
    of_writes = tl.dot(dS, column_writes, input_precision=PRECISION)
    both = (dS.to(tl.float32) * S.to(tl.float32)).to(dtype)
    of_all = tl.dot(both, stack(column_products, 16, dtype), input_precision=PRECISION)
    # What the block's tokens read of each other's writes.
    inner = tl.dot(tl.trans(stack_tokens(column_written, dtype)), column_reads, input_precision=PRECISION)
    inner = tl.where(seen, inner, 0.0).to(dtype)
    of_reads = tl.dot(stack_tokens(written, dtype), inner, of_reads, input_precision=PRECISION)
    reads = stack(read_products(read, products), 32, dtype)
    of_tokens = tl.dot(reads, tl.trans(inner), input_precision=PRECISION)

    of_reads, of_tokens = unstack(of_reads, 32), unstack(of_tokens, 16)
    of_all, of_writes = unstack(of_all, 16), unstack(of_writes, 16)
    d_read = read_results(products, of_reads)
    d_written = write_results(products, of_writes, of_tokens)
    return d_read, d_written, factor_gradients(products, read, written, of_all, of_reads, of_writes)


@triton.jit(do_not_specialize=["T", "tokens", "items"])
def differentiate_chunk(
    q, k, v, beta, starts, ends, do, scratch, dq, dk, dv, dbeta, chunks, T, tokens, items, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients. Every program takes one work item after the other: a chunk, head and tile of columns.

    starts, ends [M, HV, TILES, BV, PK]: the states at the chunks' starts, the gradients of those at their ends.
    scratch [programs, 32, BV, PK]: the states before a chunk's blocks, then the gradients of those after them. dq, dk [TILES,
    tokens, HV, K]: what each tile of columns adds; dv, dbeta [tokens, HV, V]."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    dtype: tl.constexpr = k.dtype.element_ty
    scratch += tl.program_id(0).to(tl.int64) * (32 * BV * PK)
    seen = sees_write()
    for step in range(0, tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + step * tl.num_programs(0)
        tile, head, m = item % TILES, item // TILES % HV, item // TILES // HV
        first, count = chunk_place(chunks, m, T)
        channel, column = tl.arange(0, PK), tile * BV + tl.arange(0, BV)
        tile_rows = tile.to(tl.int64) * tokens * HV
        at = matrix_places((m.to(tl.int64) * HV + head) * TILES + tile, PK, BV)
        if count > 0:
            write_block_states(
                tl.load(starts + at).to(tl.float32), k, v, beta, scratch, first, count, head, channel, column, HV,
                K, PK, V, BV, HEADS_K, HEADS_BETA, PRECISION,
            )  # fmt: skip
            write_block_gradients(
                tl.load(ends + at).to(tl.float32), q, k, v, beta, do, scratch + 16 * BV * PK, first, count, head, channel,
                column, scale, HV, K, PK, V, BV, HEADS_K, HEADS_BETA, PRECISION,
            )  # fmt: skip
            for b in range(0, tl.cdiv(count, 4)):
                begin, left = first + b * 4, count - b * 4
                raw_v = load_four(v, begin, left, head, HV, column, 1, V)
                raw_beta = load_four(beta, begin, left, head, HV, column, HEADS_BETA, V)
                grads = scaled(load_four(do, begin, left, head, HV, column, 1, V), 1.0)
                queries = scaled(load_four(q, begin, left, head, HV, channel, HEADS_K, K), scale)
                keys, inverse, lengths, X = key_side(
                    load_four(k, begin, left, head, HV, channel, HEADS_K, K), PRECISION
                )
                values, least, e, u, Y = value_side(raw_v, raw_beta, lengths, PRECISION)
                of_keys, of_values = (queries, keys, X), (grads, u, Y)

                before, after = scratch + matrix_places(b, PK, BV), scratch + matrix_places(16 + b, PK, BV)
                _, du, dy = differentiate_side(before, after, of_values, of_keys, seen, dtype, PRECISION)
                parts = ()
                for t in tl.static_range(4):
                    de = lengths[t] * dy[t] + values[t] * du[t]
                    parts = parts + (e[t] * (e[t] * de),)
                    wanted, to = (column < V) & (t < left), ((begin + t) * HV + head) * V + column
                    tl.store(dv + to, infinite_to_nan(e[t] * du[t]).to(dv.dtype.element_ty), wanted)
                    grad_beta = infinite_to_nan(least[t] * (least[t] * de))
                    tl.store(dbeta + to, grad_beta.to(dbeta.dtype.element_ty), wanted)
                minus_dL = four_sums(parts)

                before, after = scratch + turned_places(b, PK, BV), scratch + turned_places(16 + b, PK, BV)
                grad_queries, grad_keys, dz = differentiate_side(
                    before, after, of_keys, of_values, seen, dtype, PRECISION
                )
                for t in tl.static_range(4):
                    wanted, to = (channel < K) & (t < left), (tile_rows + (begin + t) * HV + head) * K + channel
                    tl.store(dq + to, infinite_to_nan(grad_queries[t] * scale).to(dq.dtype.element_ty), wanted)
                    grad_key = grad_keys[t] - 2 * keys[t] * (dz[t] * inverse[t] + minus_dL[t])
                    tl.store(dk + to, infinite_to_nan(grad_key).to(dk.dtype.element_ty), wanted)
            tl.debug_barrier()
