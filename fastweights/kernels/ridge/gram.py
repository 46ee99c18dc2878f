"""The Gram matrices H at the chunks' starts, and backwards their gradients at the chunks' ends: what every chunk adds, in
parallel, then a scan over the chunks of a sequence, number by number."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import infinite_to_nan, is_bad
from ..common.packing import live_tokens, pieces_of_sequence, program_part, tokens_of_sequence
from ..common.tiles import load_rows, row_places
from .chunk import decay_factors, load_gain


@triton.jit(do_not_specialize=["time"])
def gram_sums(
    k, beta, gate, sums, writes, chunks, time, HV,
    K: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, K, K]: sum_j W_j k_j k_j^T of a chunk, decayed to its end. writes [BT, HV, K]: beta k."""
    part, m, head, first, count = program_part(chunks, time, (K + BV - 1) // BV)
    if count == 0:
        return
    i, live = live_tokens(count)
    c, column = tl.arange(0, PK), part * BV + tl.arange(0, BV)
    keys = load_rows(k, first, live, head, HV, c, K, HEADS_K)
    some = load_rows(k, first, live, head, HV, column, K, HEADS_K).to(tl.float32)
    decay, total = decay_factors(gate, first, count, head, HV)
    gain = load_gain(beta, first, live, head, HV, HEADS_BETA)
    if writes is not None:
        at, here = row_places(first, live, head, HV, column, K, 1)
        tl.store(writes + at, (some * gain[:, None]).to(writes.dtype.element_ty), here)
    weight = tl.exp2(total - decay) * gain
    some *= weight[:, None]
    high = some.to(keys.dtype)  # the product takes `some` as the sum of two 16-bit numbers
    found = tl.dot(tl.trans(keys), high, input_precision=PRECISION)
    if keys.dtype != tl.float32:
        found = tl.dot(tl.trans(keys), (some - high.to(tl.float32)).to(keys.dtype), found)
    spoiled = tl.max(tl.max(is_bad(keys).to(tl.int32), 1), 0) > 0
    found = tl.where(spoiled, float("nan"), found)
    at = (m.to(tl.int64) * HV + head) * K * K
    tl.store(sums + at + c[:, None] * K + column[None, :], found, (c < K)[:, None] & (column < K)[None, :])


@triton.jit(do_not_specialize=["time"])
def gram_sums_back(
    k, beta, gate, x, e, slope, units, outsides, sums, chunks, time, HV,
    K: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
    ADAPTIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, K, K]: what a chunk adds to the gradient of H at its start,
    -(1/2) sum_t z_t (e_t x_t^T + x_t e_t^T + w_t H_t). slope [BT, HV]: w; units, outsides: see solve_chunk."""
    part, m, head, first, count = program_part(chunks, time, (K + BV - 1) // BV)
    if count == 0:
        return
    i, live = live_tokens(count)
    c, column = tl.arange(0, PK), part * BV + tl.arange(0, BV)
    decay, _ = decay_factors(gate, first, count, head, HV)
    kept = tl.exp2(decay)
    es = load_rows(e, first, live, head, HV, c, K, 1)
    right = (load_rows(x, first, live, head, HV, column, K, 1).to(tl.float32) * kept[:, None]).to(es.dtype)
    found = tl.dot(tl.trans(es), right, input_precision=PRECISION)
    xs = load_rows(x, first, live, head, HV, c, K, 1)
    right = (load_rows(e, first, live, head, HV, column, K, 1).to(tl.float32) * kept[:, None]).to(es.dtype)
    found = tl.dot(tl.trans(xs), right, found, input_precision=PRECISION)
    at = (m.to(tl.int64) * HV + head) * K * K + c[:, None] * K + column[None, :]
    inside = (c < K)[:, None] & (column < K)[None, :]
    if ADAPTIVE:
        w = tl.load(slope + first * HV + head + i * HV, live, 0.0) * kept
        pair = tl.exp2(tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], 0.0))
        weight = tl.sum(tl.where(i[:, None] >= i[None, :], pair * w[:, None], 0.0), 0)
        weight *= load_gain(beta, first, live, head, HV, HEADS_BETA)
        keys = load_rows(k, first, live, head, HV, c, K, HEADS_K)
        some = load_rows(k, first, live, head, HV, column, K, HEADS_K).to(tl.float32) * weight[:, None]
        found = tl.dot(tl.trans(keys), some.to(keys.dtype), found, input_precision=PRECISION)
        outside = tl.load(outsides + m * HV + head) * tl.sum(w * kept, 0)
        found += outside * tl.load(units + at, inside, 0.0).to(tl.float32)
    tl.store(sums + at, -0.5 * found, inside)


@triton.jit
def load_added(
    sums, gate, step, low, chunks, first, stop, head, HV, at, K: tl.constexpr, AHEAD: tl.constexpr, BACK: tl.constexpr
):
    """What AHEAD chunks from `step` on add, and their decays; 0 past the last one."""
    added, totals = (), ()
    for later in tl.static_range(AHEAD):
        here = step + later < chunks
        m = (chunks - 1 - step - later) if BACK else (step + later)
        R = sums + ((low + m).to(tl.int64) * HV + head) * K * K + at
        added += (tl.load(R, (at < K * K) & here, 0.0),)  # type: ignore[assignment]
        last = tl.minimum(first + m * 64 + 64, stop) - 1
        totals += (tl.load(gate + last * HV + head, here, 0.0),)  # type: ignore[assignment]
    return added, totals


@triton.jit(do_not_specialize=["time"])
def scan_states(
    begin, sums, states, squares, gate, end, cu_seqlens, time, HV,
    K: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """S <- exp(total) S + R from chunk to chunk (BACK: from the last). sums: R per chunk; states: the S before, which may take
    the place of R; squares [M, HV, blocks, 8]: sums of squares of S, or None. begin, end: S per sequence; of `begin` the
    symmetric part."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, time)
    stop = first + count
    low, chunks = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K * K
    own = (n.to(tl.int64) * HV + head) * K * K
    if begin is None:
        S = tl.zeros((BLOCK,), tl.float32)
    else:
        S = 0.5 * (tl.load(begin + own + at, inside, 0.0) + tl.load(begin + own + (at % K) * K + at // K, inside, 0.0))
    added, totals = load_added(sums, gate, 0, low, chunks, first, stop, head, HV, at, K, AHEAD, BACK)
    for step in range(0, chunks, AHEAD):
        now, factors = added, totals
        added, totals = load_added(sums, gate, step + AHEAD, low, chunks, first, stop, head, HV, at, K, AHEAD, BACK)
        for later in tl.static_range(AHEAD):
            here = step + later < chunks
            m = (chunks - 1 - step - later) if BACK else (step + later)
            before = states + ((low + m).to(tl.int64) * HV + head) * K * K + at
            tl.store(before, S.to(states.dtype.element_ty), inside & here)
            if squares is not None:  # by parts that one warp holds
                part = ((low + m).to(tl.int64) * HV + head) * tl.num_programs(2) + tl.program_id(2)
                own_sums = tl.sum(tl.reshape(S * S, (8, BLOCK // 8)), 1)
                tl.store(squares + part * 8 + tl.arange(0, 8), own_sums, here)
            S = tl.exp2(factors[later]) * S + now[later]
    if end is not None:
        tl.store(end + own + at, infinite_to_nan(S), inside)
