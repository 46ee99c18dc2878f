"""Stepping forwards through the tokens of a segment: the outputs, and what they add to the gradients of its first state."""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import or_nan
from ..packing import segment_place
from .tile import add_to, load_rows, load_tile, load_token, prefetch_token, spread, store_tile, write

AHEAD = tl.constexpr(2)  # tokens between a prefetch and the use


@triton.jit
def read_tile(M, J, query, prior, PARTS: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr):
    """Mean and variance [BV] that a query reads; without VARIANCE the mean stands for both."""
    for part in tl.static_range(PARTS):
        x = query[part][:, None]
        r = spread(J[part], prior, PRECISION)
        # One sum over channels for all parts: its exchange between threads is what costs.
        if part == 0:
            mean = (x * M[part]) * r
        else:
            mean += (x * M[part]) * r
        if VARIANCE:
            if part == 0:
                variance = (x * x) * r
            else:
                variance += (x * x) * r
    o = tl.sum(mean, 0)
    w = tl.sum(variance, 0) if VARIANCE else o
    return o, w


@triton.jit(do_not_specialize=["time", "started"])
def read_posterior(
    q, k, v, beta, g, prior, M_start, J_start, o, variance, M_end, J_end, segments, time, started, scale, HV,
    K: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
    ENDED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M_start, J_start [P, HV, K, V]: states at the segments' starts, anything where `started` is 0; M_end, J_end [N, HV, K, V]:
    the final ones."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, segment, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES, tl.program_id(1)
    first, stop, _, sequence, _, is_last = segment_place(segments, segment, time)
    column = tile * BV + tl.arange(0, BV)
    live = column < V
    p = tl.load(prior + head)
    held = p if PRECISION == "tf32" else 0.0
    state = segment.to(tl.int64) * HV + head
    # Zeros are loaded as well, by a mask that is not known when compiling. The layout of this load is that of all that follows:
    # four columns per thread, where tl.zeros would take one, and four times as many channels.
    given = started > 0
    M = load_tile(M_start, state, 0, column, given, K, V, P, PARTS)
    J = add_to(load_tile(J_start, state, 0, column, given, K, V, P, PARTS), held, PARTS)
    for t in range(first, stop):
        ahead = tl.minimum(t + AHEAD, stop - 1)
        prefetch_token(q, k, v, beta, ahead, tile * BV, head, HV, K, V, BV, HEADS_K, HEADS_BETA, PRECISION)
        key, value, gain, a = load_token(
            k, v, beta, g, t, True, column, 0, head, HV, K, P, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G
        )
        query = load_rows(q, (t * (HV // HEADS_K) + head // HEADS_K) * K, 0, K, P, PARTS)
        M, J = write(M, J, key, value, gain, a, held - a * held, PARTS)
        mean, var = read_tile(M, J, query, p, PARTS, VARIANCE, PRECISION)
        at = (t * HV + head) * V + column
        tl.store(o + at, or_nan(mean * scale).to(o.dtype.element_ty), live)
        if VARIANCE:
            tl.store(variance + at, or_nan(var * (scale * scale)).to(o.dtype.element_ty), live)
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if is_last:
            end = sequence.to(tl.int64) * HV + head
            store_tile(M_end, end, 0, column, M, K, V, P, PARTS)
            store_tile(J_end, end, 0, column, add_to(J, -held, PARTS), K, V, P, PARTS)


@triton.jit(do_not_specialize=["time"])
def segment_gradients(
    q, k, v, beta, g, prior, M_start, J_start, do, dw, dM_out, dJ_out, segments, time, scale, HV,
    K: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the outputs of a segment add to the gradients of the states at its start: dM_out, dJ_out [P, HV, K, V]."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, segment, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES, tl.program_id(1)
    first, stop, _, _, _, _ = segment_place(segments, segment, time)
    column = tile * BV + tl.arange(0, BV)
    live = column < V
    p = tl.load(prior + head)
    held = p if PRECISION == "tf32" else 0.0
    state = segment.to(tl.int64) * HV + head
    M = load_tile(M_start, state, 0, column, True, K, V, P, PARTS)
    J = add_to(load_tile(J_start, state, 0, column, True, K, V, P, PARTS), held, PARTS)
    dM = load_tile(M_start, state, 0, column, time < 0, K, V, P, PARTS)
    dJ = load_tile(J_start, state, 0, column, time < 0, K, V, P, PARTS)
    kept = 1.0
    for t in range(first, stop):
        key, value, gain, a = load_token(
            k, v, beta, g, t, True, column, 0, head, HV, K, P, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G
        )
        query = load_rows(q, (t * (HV // HEADS_K) + head // HEADS_K) * K, 0, K, P, PARTS)
        M, J = write(M, J, key, value, gain, a, held - a * held, PARTS)
        kept *= a
        grad_o = tl.load(do + (t * HV + head) * V + column, live, 0.0).to(tl.float32) * (scale * kept)
        if VARIANCE:
            grad_w = tl.load(dw + (t * HV + head) * V + column, live, 0.0).to(tl.float32) * (scale * scale * kept)
        new_dM, new_dJ = (), ()
        for part in tl.static_range(PARTS):
            r = spread(J[part], p, PRECISION)
            x = query[part][:, None]
            read = x * (grad_o[None, :] * r)
            new_dM = new_dM + (dM[part] + read,)
            if VARIANCE:
                new_dJ = new_dJ + (dJ[part] - read * (M[part] * r) - (x * x) * (grad_w[None, :] * r) * r,)
            else:
                new_dJ = new_dJ + (dJ[part] - read * (M[part] * r),)
        dM, dJ = new_dM, new_dJ
    store_tile(dM_out, state, 0, column, dM, K, V, P, PARTS)
    store_tile(dJ_out, state, 0, column, dJ, K, V, P, PARTS)
