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
def changes(row_products, column_products, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """What the decays of a block take from every element, as a factor minus one [rows, columns]."""
    rows, columns = stack(without_empty(row_products), 16, dtype), stack(without_empty(column_products), 16, dtype)
    return tl.dot(rows, tl.trans(columns), input_precision=PRECISION)


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
    """What each chunk makes of a state: kept * S + added, float32 [M, HV, TILES, BV, PK]. BACK: of the gradient of the state after
    it. Two programs per chunk, head and tile of columns: one goes from zeros, one from ones without writes."""
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
        S += changes(Y, X, dtype, PRECISION) * S
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
    """S <- kept * S + added from chunk to chunk of a sequence (BACK: from the last). starts [M, HV, TILES, BV, PK]: the S that each
    chunk begins with. begin, end [N, HV, K, V] or None: S before and after. A program has BLOCK channels of a tile's columns."""
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
        found = tl.dot(stack_tokens(u, dtype), inner, found, input_precision=PRECISION)
        answers = read_results(Y, unstack(found, 32))
        for t in tl.static_range(4):
            to = token_address(o, begin + t, head, HV, 1, V) + column
            tl.store(to, infinite_to_nan(answers[t]).to(o.dtype.element_ty), (column < V) & (t < left))
        S += changes(Y, X, dtype, PRECISION) * S
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
        S += changes(Y, X, dtype, PRECISION) * S
        S = add_writes(S, u, Y, keys, X, dtype, PRECISION)
    tl.debug_barrier()


@triton.jit
def products_of_side(written, reads, column_written, column_reads, of_reads, seen, PRECISION: tl.constexpr):
    """What the reads of a side found in the state, and in what the block itself wrote: of the reads' products [rows, 32], and of the
    tokens' writes [rows, 16]."""
    dtype: tl.constexpr = reads.dtype
    inner = tl.dot(tl.trans(stack_tokens(column_written, dtype)), column_reads, input_precision=PRECISION)
    inner = tl.where(seen, inner, 0.0).to(dtype)
    of_reads = tl.dot(stack_tokens(written, dtype), inner, of_reads, input_precision=PRECISION)
    return of_reads, tl.dot(reads, tl.trans(inner), input_precision=PRECISION)


@triton.jit
def gradients_of_side(read, written, products, of_reads, of_tokens, of_all, of_writes):
    """The gradients of what the tokens of a side read and write, and of their factors."""
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

    starts, ends [M, HV, TILES, BV, PK]: the states at the chunks' starts, the gradients of those at their ends. scratch [programs,
    16, BV, PK]. dq, dk [TILES, tokens, HV, K]: what each tile of columns adds; dv, dbeta [tokens, HV, V]."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    dtype: tl.constexpr = k.dtype.element_ty
    scratch += tl.program_id(0).to(tl.int64) * (16 * BV * PK)
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
            dS = tl.load(ends + at).to(tl.float32)
            for b in range(tl.cdiv(count, 4) - 1, -1, -1):
                begin, left = first + b * 4, count - b * 4
                S = tl.load(scratch + matrix_places(b, PK, BV))
                raw_v = load_four(v, begin, left, head, HV, column, 1, V)
                raw_beta = load_four(beta, begin, left, head, HV, column, HEADS_BETA, V)
                grads = scaled(load_four(do, begin, left, head, HV, column, 1, V), 1.0)
                queries = scaled(load_four(q, begin, left, head, HV, channel, HEADS_K, K), scale)
                keys, inverse, lengths, X = key_side(load_four(k, begin, left, head, HV, channel, HEADS_K, K), PRECISION)
                values, least, e, u, Y = value_side(raw_v, raw_beta, lengths, PRECISION)
                QX, DY = stack(read_products(queries, X), 32, dtype), stack(read_products(grads, Y), 32, dtype)
                v_reads = tl.dot(S, QX, input_precision=PRECISION)
                k_reads = tl.dot(tl.trans(S), DY, input_precision=PRECISION)
                both = (dS * S.to(tl.float32)).to(dtype)
                v_all = tl.dot(both, stack(X, 16, dtype), input_precision=PRECISION)
                k_all = tl.dot(tl.trans(both), stack(Y, 16, dtype), input_precision=PRECISION)
                small = dS.to(dtype)
                v_writes = tl.dot(small, stack(write_products(keys, X), 16, dtype), input_precision=PRECISION)
                k_writes = tl.dot(tl.trans(small), stack(write_products(u, Y), 16, dtype), input_precision=PRECISION)
                v_reads, v_tokens = products_of_side(u, DY, keys, QX, v_reads, seen, PRECISION)
                k_reads, k_tokens = products_of_side(keys, QX, u, DY, k_reads, seen, PRECISION)

                _, du, dy = gradients_of_side(grads, u, Y, v_reads, v_tokens, v_all, v_writes)
                parts = ()
                for t in tl.static_range(4):
                    de = lengths[t] * dy[t] + values[t] * du[t]
                    parts = parts + (e[t] * (e[t] * de),)
                    wanted, to = (column < V) & (t < left), ((begin + t) * HV + head) * V + column
                    tl.store(dv + to, infinite_to_nan(e[t] * du[t]).to(dv.dtype.element_ty), wanted)
                    grad_beta = infinite_to_nan(least[t] * (least[t] * de))
                    tl.store(dbeta + to, grad_beta.to(dbeta.dtype.element_ty), wanted)
                minus_dL = four_sums(parts)

                grad_queries, grad_keys, dz = gradients_of_side(queries, keys, X, k_reads, k_tokens, k_all, k_writes)
                for t in tl.static_range(4):
                    wanted, to = (channel < K) & (t < left), (tile_rows + (begin + t) * HV + head) * K + channel
                    tl.store(dq + to, infinite_to_nan(grad_queries[t] * scale).to(dq.dtype.element_ty), wanted)
                    grad_key = grad_keys[t] - 2 * keys[t] * (dz[t] * inverse[t] + minus_dL[t])
                    tl.store(dk + to, infinite_to_nan(grad_key).to(dk.dtype.element_ty), wanted)

                dS += changes(Y, X, dtype, PRECISION) * dS
                dS = tl.dot(DY, tl.trans(QX), dS, input_precision=PRECISION)
            tl.debug_barrier()
