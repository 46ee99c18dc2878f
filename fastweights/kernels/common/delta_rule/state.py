"""The pass over chunks: the state at every chunk's start, and backwards its gradient at every chunk's end.

    u = U - W S          S <- decay S + KW_decayed^T u                (without U, W the values are written as they are)
    du = du' + KW_decayed dS      dS <- decay dS + Q_decayed^T dO - W^T du      z = T^T du

A program carries all key channels of some value columns through one segment. The segments of a sequence run in parallel, from
states that `combine_segments` finds beforehand: a segment takes S to T S + R. A pass from zero gives R; a pass of the identity
with nothing to write gives the transition T. Backwards T^T takes its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import infinite_to_nan
from ..packing import segment_place
from ..tiles import load_tile


@triton.jit(do_not_specialize=["time"])
def chunk_state(
    k, k_rest, W, U, gate, last_gate, start, states, end, transition, segments, time, H, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HEADS_K: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, STARTED: tl.constexpr, ENDED: tl.constexpr, SUMMARY: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, GOES_ON: tl.constexpr,
):  # fmt: skip
    """k [BT, heads, K]: write keys (HEADS_K = HV // heads); k_rest: what k lacks, or None. DECAY: 0 none, 1 per head (gate
    [BT, HV], chunk cumsum, base 2), 2 per channel (last_gate [M, HV, K]; k already decayed to the chunk's end). U is overwritten
    by u. start: per segment; end: per sequence. SUMMARY: R goes into `end` and T into `transition` (without DELTA its log decay),
    per segment. GOES_ON: whether the sequences go on behind their last segment."""
    VALUES: tl.constexpr = (V + BV - 1) // BV
    PARTS: tl.constexpr = VALUES + ((K + BV - 1) // BV if SUMMARY and DELTA else 0)
    part, segment, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    first, stop, m, _, _, is_last = segment_place(segments, segment, time)
    c = tl.arange(0, PK)
    i = tl.arange(0, 64)
    is_value = part < VALUES
    column = tl.where(is_value, part, part - VALUES) * BV + tl.arange(0, BV)
    if SUMMARY and DELTA and not GOES_ON:  # nobody reads what the last segment adds
        stop = tl.where(is_value & is_last, first.to(tl.int32), stop)
    inside = (c < K)[:, None] & (column < V)[None, :]
    at_segment = (segment.to(tl.int64) * HV + head) * K
    if SUMMARY:
        S = tl.where((c[:, None] == column[None, :]) & (not is_value), 1.0, 0.0)
    elif STARTED:
        S = tl.load(start + at_segment * V + c[:, None] * V + column[None, :], inside, 0.0).to(tl.float32)
    else:
        S = tl.zeros((PK, BV), tl.float32)
    kept = tl.zeros((PK,), tl.float32)  # the segment's whole log decay
    if DECAY == 1:  # loaded one step ahead
        next_decay = tl.load(gate + (first + i) * HV + head, first + i < stop, 0.0)
        next_total = tl.load(gate + (tl.minimum(first + 64, stop) - 1) * HV + head, first < stop, 0.0)
    begin = first
    if k_rest is not None:  # with it Triton 3.5 compiles for sm_100 only where the loop counts in 32 bits
        begin, stop = first.to(tl.int32), stop.to(tl.int32)
    for counted in tl.range(begin, stop, 64, num_stages=STAGES):
        t = tl.cast(counted, tl.int64)
        live = t + i < stop
        place = t * HV + head  # scalars in front, so that the offsets of a tile are small numbers
        state = (m * HV + head) * K * V
        row = i * HV
        whole = live[:, None] & (c < K)[None, :]
        narrow = live[:, None] & (column < V)[None, :]
        keys = load_tile(k, t, whole, head, HV, c, K, HEADS_K)
        S_low = S.to(keys.dtype)
        if DECAY == 1:
            decay, total = next_decay, next_total
            next_decay = tl.load(gate + place + (row + 64 * HV), t + 64 + i < stop, 0.0)
            next_total = tl.load(gate + (tl.minimum(t + 128, stop) - 1) * HV + head)
        if SUMMARY:
            u = tl.load(U + place * V + row[:, None] * V + column[None, :], narrow & is_value, 0.0).to(tl.float32)
        else:
            tl.store(states + state + c[:, None] * V + column[None, :], S_low, inside)
            u = tl.load(U + place * V + row[:, None] * V + column[None, :], narrow, 0.0).to(tl.float32)
        if DELTA:
            w = tl.load(W + place * K + row[:, None] * K + c[None, :], whole, 0.0)
            u -= tl.dot(w, S_low, input_precision=PRECISION)
            if not SUMMARY:
                tl.store(U + place * V + row[:, None] * V + column[None, :], u.to(U.dtype.element_ty), narrow)
        if DECAY == 1:
            u *= tl.exp2(total - decay)[:, None]
            S *= tl.exp2(total)
            kept += total
        elif DECAY == 2:
            totals = tl.load(last_gate + (m * HV + head) * K + c, c < K, 0.0)
            S *= tl.exp2(totals)[:, None]
            kept += totals
        S = tl.dot(tl.trans(keys), u.to(keys.dtype), S, input_precision=PRECISION)
        if k_rest is not None:
            rest = load_tile(k_rest, t, whole, head, HV, c, K, HEADS_K)
            S = tl.dot(tl.trans(rest), u.to(keys.dtype), S, input_precision=PRECISION)
        m += 1
    if SUMMARY:
        if is_value:
            tl.store(end + (at_segment + c)[:, None] * V + column[None, :], S, inside)
            if not DELTA and part == 0:
                tl.store(transition + at_segment + c, kept, c < K)
        else:
            at = transition + (at_segment + c)[:, None] * K + column[None, :]
            tl.store(at, S, (c < K)[:, None] & (column < K)[None, :])
    elif ENDED:  # noqa: SIM102 (one is known when compiling)
        # Looked up again: kept through the loop, these would crowd the registers.
        _, _, _, sequence, _, is_last = segment_place(segments, segment, time)
        if is_last:
            at_end = (sequence.to(tl.int64) * HV + head) * K
            tl.store(end + at_end * V + c[:, None] * V + column[None, :], infinite_to_nan(S), inside)


@triton.jit(do_not_specialize=["time"])
def chunk_state_backward(
    q, k, k_rest, W, read_key, divisor, inverse, dU, do, gate, last_gate, start, states, end, segments, time, scale, H, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, STARTED: tl.constexpr, ENDED: tl.constexpr, SUMMARY: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`start` is the gradient of the state at the end of every segment, `states` that at the end of every chunk, `end` that of
    the sequences' initial states (with SUMMARY that at the segments' start, from zero at their end). dU holds the gradient from
    the outputs inside the chunk and is overwritten by z. With DECAY 2 q comes decayed and scaled, k decayed. divisor [BT, HV] of
    the outputs, or None. read_key, as q, in the place of W, where beta is 1 and nothing decays: W^T du = K^T z. Where keys are
    alike the terms of T^T du cancel, and so would those of W^T du: T and dU come in float32, for a product in tf32."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    part, segment, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    first, stop, first_chunk, _, _, _ = segment_place(segments, segment, time)
    chunks = (stop - first + 63) // 64
    m = first_chunk + chunks - 1
    c = tl.arange(0, PK)
    i = tl.arange(0, 64)
    column = part * BV + tl.arange(0, BV)
    inside = (c < K)[:, None] & (column < V)[None, :]
    at_segment = (segment.to(tl.int64) * HV + head) * K
    if STARTED:
        dS = tl.load(start + (at_segment + c)[:, None] * V + column[None, :], inside, 0.0).to(tl.float32)
    else:
        dS = tl.zeros((PK, BV), tl.float32)
    t = first + (chunks - 1) * 64
    if DECAY == 1:  # loaded one step ahead
        next_decay = tl.load(gate + (t + i) * HV + head, (t + i < stop) & (chunks > 0), 0.0)
        next_total = tl.load(gate + (stop - 1).to(tl.int64) * HV + head, chunks > 0, 0.0)
    for _ in tl.range(0, chunks, num_stages=STAGES):
        live = t + i < stop
        place = t * HV + head  # scalars in front, so that the offsets of a tile are small numbers
        state = (m * HV + head) * K * V
        row = i * HV
        whole = live[:, None] & (c < K)[None, :]
        narrow = live[:, None] & (column < V)[None, :]
        queries = load_tile(q, t, whole, head, HV, c, K, HEADS_Q)
        grad_o = tl.load(do + place * V + row[:, None] * V + column[None, :], narrow, 0.0)
        dS_low = dS.to(queries.dtype)
        if not SUMMARY:
            tl.store(states + state + c[:, None] * V + column[None, :], dS_low, inside)
        if DECAY == 1:
            decay, total = next_decay, next_total
            next_decay = tl.load(gate + place - 64 * HV + row, t > first, 0.0)
            next_total = tl.load(gate + (t - 1) * HV + head, t > first, 0.0)
            grad_o = (grad_o.to(tl.float32) * (scale * tl.exp2(decay))[:, None]).to(queries.dtype)
        elif DECAY == 0 and divisor is None:
            grad_o = (grad_o.to(tl.float32) * scale).to(queries.dtype)
        elif DECAY == 0:
            by = tl.load(divisor + place + row, live, 1.0)
            grad_o = (grad_o.to(tl.float32) * (scale / by)[:, None]).to(queries.dtype)
        if DELTA:
            keys = load_tile(k, t, whole, head, HV, c, K, HEADS_K)
            du = tl.dot(keys, dS_low, input_precision=PRECISION)
            if k_rest is not None:
                rest = load_tile(k_rest, t, whole, head, HV, c, K, HEADS_K)
                du = tl.dot(rest, dS_low, du, input_precision=PRECISION)
            if DECAY == 1:
                du *= tl.exp2(total - decay)[:, None]
            du += tl.load(dU + place * V + row[:, None] * V + column[None, :], narrow, 0.0).to(tl.float32)
            du_low = du.to(inverse.dtype.element_ty)
            if not SUMMARY or read_key is not None:
                T = tl.load(inverse + place * 64 + row[:, None] * 64 + i[None, :], live[:, None], 0.0)
                z = tl.dot(tl.trans(T), du_low, input_precision=PRECISION)
            if not SUMMARY:
                tl.store(dU + place * V + row[:, None] * V + column[None, :], z.to(dU.dtype.element_ty), narrow)
        if DECAY == 1:
            dS *= tl.exp2(total)
        elif DECAY == 2:
            dS *= tl.exp2(tl.load(last_gate + (m * HV + head) * K + c, c < K, 0.0))[:, None]
        dS = tl.dot(tl.trans(queries), grad_o, dS, input_precision=PRECISION)
        if DELTA and read_key is None:
            w = tl.load(W + place * K + row[:, None] * K + c[None, :], whole, 0.0)
            dS -= tl.dot(tl.trans(w), du_low, input_precision=PRECISION)
        elif DELTA:
            read = load_tile(read_key, t, whole, head, HV, c, K, HEADS_Q)
            dS = tl.dot(tl.trans(read), (-z).to(read.dtype), dS, input_precision=PRECISION)
        m -= 1
        t -= 64
    if SUMMARY:
        tl.store(end + (at_segment + c)[:, None] * V + column[None, :], dS, inside)
    elif ENDED:  # noqa: SIM102 (one is known when compiling)
        _, _, _, sequence, is_first, _ = segment_place(segments, segment, time)
        if is_first:
            at_end = (sequence.to(tl.int64) * HV + head) * K
            tl.store(end + (at_end + c)[:, None] * V + column[None, :], dS, inside)
