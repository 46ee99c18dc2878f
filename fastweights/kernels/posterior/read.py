"""Stepping forwards through the tokens of a segment: the outputs, and what they add to the gradients of its first state."""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import or_nan, prefetch
from ..packing import segment_place
from .lanes import over_eight_lanes
from .tile import at_token, load_raw, load_tile, of_raw, prefetch_lanes, spoiled, spread, store_tile, times, write

AHEAD = tl.constexpr(2)  # tokens between a prefetch and the use
# Decays are applied to the tile once they have come to more than this.
LARGEST_FACTOR, LARGEST_IN_FLOAT32 = tl.constexpr(2.0**30), tl.constexpr(2.0)


@triton.jit
def decayed(M, J, f, floor, p, decay, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """M, J, f and f p before a token's write, and by what M and J were multiplied. (A product f p in the sum J + f p would be
    computed for every element.)"""
    LARGEST: tl.constexpr = LARGEST_FACTOR if PRECISION == "tf32" else LARGEST_IN_FLOAT32
    inverse = tl.exp2(-decay)
    f, floor = f * inverse, floor * inverse
    by = 1.0
    if (f > LARGEST) | (f < 1.0 / LARGEST):
        by = 1.0 / f
        M, J = times(M, by, PARTS), times(J, by, PARTS)
        f, floor = 1.0, p
    return M, J, f, floor, by


@triton.jit
def read_tile(M, J, query, prior, PARTS: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr):
    """What lanes have to add up for the mean and variance of a query [8, 16]; without VARIANCE the mean stands for both."""
    for part in tl.static_range(PARTS):
        x = query[part][:, None]
        r = spread(J[part] + prior, PRECISION)
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


@triton.jit(do_not_specialize=["time", "started"])
def read_posterior(
    q, k, v, beta, g, prior, M_start, J_start, o, variance, M_end, J_end, segments, time, started, scale, HV,
    K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
    ENDED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr, LOADS_AHEAD: tl.constexpr,
):  # fmt: skip
    """M_start, J_start [P, HV, K, V]: states at the segments' starts, anything where `started` is 0; M_end, J_end [N, HV, K, V]:
    the final ones. LOADS_AHEAD: the next token is loaded into registers, in place of being prefetched into the L1 cache."""
    TILES: tl.constexpr = (V + 15) // 16
    tile, segment, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES, tl.program_id(1)
    first, stop, chunk, sequence, is_first, is_last = segment_place(segments, segment, time)
    column = tile * 16 + tl.arange(0, 16)
    p = tl.load(prior + head)
    state = segment.to(tl.int64) * HV + head
    # Zeros are loaded as well, by a mask that is not known when compiling. The layout of this load is that of all that follows:
    # four columns per thread, where tl.zeros would take one, and four times as many channels.
    given = started > 0
    M = load_tile(M_start, state, 0, column, given, K, V, PARTS)
    J = load_tile(J_start, state, 0, column, given, K, V, PARTS)
    if PRECISION == "tf32" and not LOADS_AHEAD:
        fetched, stride = prefetch_lanes(q, k, v, beta, first, tile * 16, head, HV, K, V, HEADS_K, HEADS_BETA)
    q, k = at_token(q, first, head, HV, HEADS_K, K), at_token(k, first, head, HV, HEADS_K, K)
    v, o = at_token(v, first, head, HV, 1, V), at_token(o, first, head, HV, 1, V)
    beta, g = at_token(beta, first, head, HV, HEADS_BETA, V), at_token(g, first, head, HV, HEADS_G, 1)
    if VARIANCE:
        variance = at_token(variance, first, head, HV, 1, V)
    f, floor = 1.0, p
    count = stop - first
    if count > 0:
        if LOADS_AHEAD:
            ahead = load_raw(q, k, v, beta, g, None, None, 0, column, 0, HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G)
        for i in range(0, count):
            if LOADS_AHEAD:
                token = ahead
                ahead = load_raw(
                    q, k, v, beta, g, None, None, tl.minimum(i + 1, count - 1), column, 0, HV, K, PARTS, V, HEADS_K, HEADS_BETA,
                    HEADS_G,
                )  # fmt: skip
            else:
                if PRECISION == "tf32":  # float32, which the interpreter runs too, does without
                    prefetch(fetched + tl.minimum(i + AHEAD, count - 1) * stride)
                token = load_raw(
                    q, k, v, beta, g, None, None, i, column, 0, HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G
                )
            query, key, value, gain, decay = of_raw(token, q, K, PARTS)[0:5]
            if VARIANCE:  # without it infinite keys show in the mean anyway: infinity over infinity
                finite = ()
                for part in tl.static_range(PARTS):
                    finite = finite + (spoiled(key[part]),)
                key = finite
            M, J, f, floor, by = decayed(M, J, f, floor, p, decay, PARTS, PRECISION)
            M, J = write(M, J, key, f * value, f * gain, PARTS)
            mean, var = read_tile(M, J, query, floor, PARTS, VARIANCE, PRECISION)
            at = i * (HV * V)
            total, own_column = over_eight_lanes(mean, tile * 16)
            tl.store(o + at + own_column, or_nan(total * scale).to(o.dtype.element_ty), own_column < V)
            if VARIANCE:
                total, own_column = over_eight_lanes(var, tile * 16)
                total *= f * (scale * scale)
                tl.store(variance + at + own_column, or_nan(total).to(o.dtype.element_ty), own_column < V)
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if is_last:
            end = sequence.to(tl.int64) * HV + head
            store_tile(M_end, end, 0, column, times(M, 1.0 / f, PARTS), K, V, PARTS)
            store_tile(J_end, end, 0, column, times(J, 1.0 / f, PARTS), K, V, PARTS)


@triton.jit(do_not_specialize=["time"])
def segment_gradients(
    q, k, v, beta, g, prior, M_start, J_start, do, dw, dM_out, dJ_out, segments, time, scale, HV,
    K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the outputs of a segment add to the gradients of the states at its start: dM_out, dJ_out [P, HV, K, V]."""
    TILES: tl.constexpr = (V + 15) // 16
    K_TILES: tl.constexpr = (K + 8 * PARTS - 1) // (8 * PARTS)
    tile, segment, head = (
        tl.program_id(0) % (TILES * K_TILES),
        tl.program_id(0) // (TILES * K_TILES),
        tl.program_id(1),
    )
    first, stop, chunk, sequence, is_first, is_last = segment_place(segments, segment, time)
    stop = tl.where(is_first, first, stop)  # no segment ends where a sequence's first one starts
    first_key = tile // TILES * (8 * PARTS)
    column = tile % TILES * 16 + tl.arange(0, 16)
    p = tl.load(prior + head)
    state = segment.to(tl.int64) * HV + head
    M = load_tile(M_start, state, first_key, column, True, K, V, PARTS)
    J = load_tile(J_start, state, first_key, column, True, K, V, PARTS)
    dM = load_tile(M_start, state, first_key, column, time < 0, K, V, PARTS)
    debt = load_tile(J_start, state, first_key, column, time < 0, K, V, PARTS)  # -dJ
    q, k = at_token(q, first, head, HV, HEADS_K, K), at_token(k, first, head, HV, HEADS_K, K)
    v, do = at_token(v, first, head, HV, 1, V), at_token(do, first, head, HV, 1, V)
    beta, g = at_token(beta, first, head, HV, HEADS_BETA, V), at_token(g, first, head, HV, HEADS_G, 1)
    f, floor, kept = 1.0, p, 1.0
    dw = at_token(dw, first, head, HV, 1, V) if VARIANCE else None
    count = stop - first
    if count > 0:
        ahead = load_raw(q, k, v, beta, g, do, dw, 0, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G)
        for i in range(0, count):
            token = ahead
            ahead = load_raw(
                q, k, v, beta, g, do, dw, tl.minimum(i + 1, count - 1), column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA,
                HEADS_G,
            )  # fmt: skip
            query, key, value, gain, decay, grad_o, grad_w = of_raw(token, q, K, PARTS)
            M, J, f, floor, by = decayed(M, J, f, floor, p, decay, PARTS, PRECISION)
            kept *= by
            M, J = write(M, J, key, f * value, f * gain, PARTS)
            grad_o *= scale * kept
            grad_w *= scale * scale * f * kept
            new_dM, new_debt = (), ()
            for part in tl.static_range(PARTS):
                r = spread(J[part] + floor, PRECISION)
                x = query[part][:, None]
                read = x * (grad_o[None, :] * r)
                owed = tl.fma(read, M[part] * r, debt[part])
                if VARIANCE:
                    owed += (x * x) * (grad_w[None, :] * r) * r
                new_dM, new_debt = new_dM + (dM[part] + read,), new_debt + (owed,)
            dM, debt = new_dM, new_debt
    store_tile(dM_out, state, first_key, column, dM, K, V, PARTS)
    store_tile(dJ_out, state, first_key, column, times(debt, -1.0, PARTS), K, V, PARTS)
