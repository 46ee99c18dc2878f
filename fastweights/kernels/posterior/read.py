"""Stepping forwards through the tokens of a segment: the outputs, and what they add to the gradients of its first state."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import clamp_decay, infinite_to_nan, prefetch
from ..common.packing import segment_place
from ..common.tiles import token_address
from .tile import (
    inverse_importance,
    load_columns,
    load_inputs,
    load_rows,
    load_tile,
    mark_infinite,
    prefetch_lanes,
    scale_tile,
    store_tile,
    sum_over_eight_lanes,
    unpack_columns,
    unpack_rows,
    unpack_token,
    write,
)

AHEAD = tl.constexpr(2)  # tokens between a prefetch and the use
# Decays are applied to the tile once they have come to more than this.
LARGEST_FACTOR, LARGEST_IN_FLOAT32 = tl.constexpr(2.0**30), tl.constexpr(2.0)


@triton.jit
def apply_decay(M, J, f, floor, p, decay, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """M, J, f and f p before a token's write, and by what M and J were multiplied. (A product f p in the sum J + f p would be
    computed for every element.)"""
    LARGEST: tl.constexpr = LARGEST_FACTOR if PRECISION == "tf32" else LARGEST_IN_FLOAT32
    inverse = tl.exp2(-decay)
    f, floor = f * inverse, floor * inverse
    by = 1.0
    if (f > LARGEST) | (f < 1.0 / LARGEST):
        by = 1.0 / f
        M, J = scale_tile(M, by, PARTS), scale_tile(J, by, PARTS)
        f, floor = 1.0, p
    return M, J, f, floor, by


@triton.jit
def read_tile(M, J, query, prior, PARTS: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr):
    """What lanes have to add up for the mean and variance of a query [8, 16]; without VARIANCE the mean stands for both."""
    for part in tl.static_range(PARTS):
        x = query[part][:, None]
        r = inverse_importance(J[part] + prior, PRECISION)
        if part == 0:
            mean = (x * M[part]) * r
        else:
            mean += (x * M[part]) * r
        if VARIANCE:
            if part == 0:
                variance = (x * x) * r
            else:
                variance += (x * x) * r
    return mean, variance if VARIANCE else mean


@triton.jit
def take_block(tile, block: tl.constexpr, PARTS: tl.constexpr):
    """The parts of one of a program's blocks of 16 columns."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (tile[block * PARTS + part],)
    return parts


@triton.jit
def load_token(
    pointers, i, first_column, HV, K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
):  # fmt: skip
    """The token i after the one that the pointers show to, as it lies in memory: q, k, g, and values and gains by blocks."""
    q, k, v, beta, g = pointers
    columns = ()
    for block in tl.static_range(BLOCKS):
        value = load_columns(v, i * (HV * V), first_column + 16 * block, V)
        columns = columns + ((value, load_columns(beta, i * (HV // HEADS_BETA * V), first_column + 16 * block, V)),)
    query = load_rows(q, i * (HV // HEADS_K * K), 0, K, PARTS)
    return query, load_rows(k, i * (HV // HEADS_K * K), 0, K, PARTS), tl.load(g + i * (HV // HEADS_G)), columns


@triton.jit(do_not_specialize=["time", "started"])
def read_posterior(
    q, k, v, beta, g, prior, M_start, J_start, o, variance, M_end, J_end, segments, time, started, scale, HV,
    K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
    ENDED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr, LOADS_AHEAD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """M_start, J_start [P, HV, K, V]: states at the segments' starts, anything where `started` is 0; M_end, J_end [N, HV, K, V]:
    the final ones. LOADS_AHEAD: the next token is loaded into registers, in place of being prefetched into the L1 cache, which
    it is for one block only. BLOCKS: of 16 columns, that a program holds."""
    TILES: tl.constexpr = (V + 16 * BLOCKS - 1) // (16 * BLOCKS)
    tile, segment, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES, tl.program_id(1)
    first, stop, chunk, sequence, is_first, is_last = segment_place(segments, segment, time)
    first_column = tile * 16 * BLOCKS
    column = first_column + tl.arange(0, 16)
    p = tl.load(prior + head)
    state = segment.to(tl.int64) * HV + head
    # Zeros are loaded as well, by a mask that is not known when compiling. The layout of this load is that of all that follows:
    # four columns per thread, where tl.zeros would take one, and four times as many channels.
    given = started > 0
    M, J = (), ()
    for block in tl.static_range(BLOCKS):
        M = M + load_tile(M_start, state, 0, column + 16 * block, given, K, V, PARTS)
        J = J + load_tile(J_start, state, 0, column + 16 * block, given, K, V, PARTS)
    if PRECISION == "tf32" and not LOADS_AHEAD:
        fetched, stride = prefetch_lanes(q, k, v, beta, first, first_column, head, HV, K, V, HEADS_K, HEADS_BETA)
    q, k = token_address(q, first, head, HV, HEADS_K, K), token_address(k, first, head, HV, HEADS_K, K)
    v, o = token_address(v, first, head, HV, 1, V), token_address(o, first, head, HV, 1, V)
    beta, g = token_address(beta, first, head, HV, HEADS_BETA, V), token_address(g, first, head, HV, HEADS_G, 1)
    if VARIANCE:
        variance = token_address(variance, first, head, HV, 1, V)
    f, floor = 1.0, p
    pointers = q, k, v, beta, g
    count = stop - first
    if count > 0:
        if LOADS_AHEAD:
            ahead = load_token(pointers, 0, first_column, HV, K, PARTS, V, BLOCKS, HEADS_K, HEADS_BETA, HEADS_G)
        for i in range(0, count):
            if LOADS_AHEAD:
                token = ahead
                later = tl.minimum(i + 1, count - 1)
                ahead = load_token(pointers, later, first_column, HV, K, PARTS, V, BLOCKS, HEADS_K, HEADS_BETA, HEADS_G)
            else:
                if PRECISION == "tf32":  # float32, which the interpreter runs too, does without
                    prefetch(fetched + tl.minimum(i + AHEAD, count - 1) * stride)
                token = load_token(pointers, i, first_column, HV, K, PARTS, V, BLOCKS, HEADS_K, HEADS_BETA, HEADS_G)
            query, key = unpack_rows(token[0], q, K, PARTS), unpack_rows(token[1], q, K, PARTS)
            if VARIANCE:  # without it infinite keys show in the mean anyway: infinity over infinity
                finite = ()
                for part in tl.static_range(PARTS):
                    finite = finite + (mark_infinite(key[part]),)
                key = finite
            M, J, f, floor, by = apply_decay(M, J, f, floor, p, clamp_decay(token[2]), PARTS * BLOCKS, PRECISION)
            all_M, all_J = (), ()
            for block in tl.static_range(BLOCKS):
                value, gain = token[3][block]
                value, gain = unpack_columns(value, q, V), mark_infinite(unpack_columns(gain, beta, V))
                new_M, new_J = write(
                    take_block(M, block, PARTS), take_block(J, block, PARTS), key, f * value, f * gain, PARTS
                )
                all_M, all_J = all_M + new_M, all_J + new_J
                mean, var = read_tile(new_M, new_J, query, floor, PARTS, VARIANCE, PRECISION)
                total, own_column = sum_over_eight_lanes(mean, first_column + 16 * block)
                at = i * (HV * V) + own_column
                tl.store(o + at, infinite_to_nan(total * scale).to(o.dtype.element_ty), own_column < V)
                if VARIANCE:
                    total, own_column = sum_over_eight_lanes(var, first_column + 16 * block)
                    total *= f * (scale * scale)
                    tl.store(variance + at, infinite_to_nan(total).to(o.dtype.element_ty), own_column < V)
            M, J = all_M, all_J
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if is_last:
            end = sequence.to(tl.int64) * HV + head
            for block in tl.static_range(BLOCKS):
                final_M, final_J = take_block(M, block, PARTS), take_block(J, block, PARTS)
                store_tile(M_end, end, 0, column + 16 * block, scale_tile(final_M, 1.0 / f, PARTS), K, V, PARTS)
                store_tile(J_end, end, 0, column + 16 * block, scale_tile(final_J, 1.0 / f, PARTS), K, V, PARTS)


@triton.jit(do_not_specialize=["time"])
def segment_gradients(
    q, k, v, beta, g, prior, M_start, J_start, do, dw, dM_out, dJ_out, segments, time, scale, HV,
    K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the outputs of a segment add to the gradients of the states at its start: dM_out, dJ_out [P, HV, K, V]."""
    V_TILES: tl.constexpr = (V + 15) // 16
    TILES: tl.constexpr = V_TILES * ((K + 8 * PARTS - 1) // (8 * PARTS))
    tile, segment, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES, tl.program_id(1)
    first, stop, chunk, sequence, is_first, is_last = segment_place(segments, segment, time)
    stop = tl.where(is_first, first, stop)  # no segment ends where a sequence's first one starts
    first_key = tile // V_TILES * (8 * PARTS)
    column = tile % V_TILES * 16 + tl.arange(0, 16)
    p = tl.load(prior + head)
    state = segment.to(tl.int64) * HV + head
    M = load_tile(M_start, state, first_key, column, True, K, V, PARTS)
    J = load_tile(J_start, state, first_key, column, True, K, V, PARTS)
    dM = load_tile(M_start, state, first_key, column, time < 0, K, V, PARTS)
    debt = load_tile(J_start, state, first_key, column, time < 0, K, V, PARTS)  # -dJ
    q, k = token_address(q, first, head, HV, HEADS_K, K), token_address(k, first, head, HV, HEADS_K, K)
    v, do = token_address(v, first, head, HV, 1, V), token_address(do, first, head, HV, 1, V)
    beta, g = token_address(beta, first, head, HV, HEADS_BETA, V), token_address(g, first, head, HV, HEADS_G, 1)
    f, floor, kept = 1.0, p, 1.0
    dw = token_address(dw, first, head, HV, 1, V) if VARIANCE else None
    count = stop - first
    if count > 0:
        pointers = q, k, v, beta, g, do
        ahead = load_inputs(pointers, dw, 0, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G)
        for i in range(0, count):
            token = ahead
            later = tl.minimum(i + 1, count - 1)
            ahead = load_inputs(pointers, dw, later, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G)
            query, key, value, gain, decay, grad_o, grad_w = unpack_token(token, q, K, PARTS)
            M, J, f, floor, by = apply_decay(M, J, f, floor, p, decay, PARTS, PRECISION)
            kept *= by
            M, J = write(M, J, key, f * value, f * gain, PARTS)
            grad_o *= scale * kept
            grad_w *= scale * scale * f * kept
            new_dM, new_debt = (), ()
            for part in tl.static_range(PARTS):
                r = inverse_importance(J[part] + floor, PRECISION)
                x = query[part][:, None]
                read = x * (grad_o[None, :] * r)
                owed = tl.fma(read, M[part] * r, debt[part])
                if VARIANCE:
                    owed += (x * x) * (grad_w[None, :] * r) * r
                new_dM, new_debt = new_dM + (dM[part] + read,), new_debt + (owed,)
            dM, debt = new_dM, new_debt
    store_tile(dM_out, state, first_key, column, dM, K, V, PARTS)
    store_tile(dJ_out, state, first_key, column, scale_tile(debt, -1.0, PARTS), K, V, PARTS)
