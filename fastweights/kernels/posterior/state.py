"""The states M and J at the starts of chunks or, with SUMMARY, what each segment adds to them: by matrix products."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import clamp_decay
from ..common.packing import segment_place
from ..common.tiles import load_gate


@triton.jit(do_not_specialize=["time"])
def posterior_state(
    k, v, beta, g, M_start, J_start, M_out, J_out, transition, segments, time, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
    STARTED: tl.constexpr, SUMMARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M_start, J_start [P, HV, K, V]: states at the segments' starts. M_out, J_out: states at the chunks' starts [M, HV, K, V],
    or with SUMMARY what a segment adds [P, HV, K, V] and in `transition` [P, HV, K] its log decay in base 2."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    part, segment, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    first, stop, m, _, _, _ = segment_place(segments, segment, time)
    c = tl.arange(0, PK)
    i = tl.arange(0, 64)
    column = part * BV + tl.arange(0, BV)
    inside = (c < K)[:, None] & (column < V)[None, :]
    in_state = c[:, None] * V + column[None, :]
    at_segment = (segment.to(tl.int64) * HV + head) * K
    if STARTED:
        M = tl.load(M_start + at_segment * V + in_state, inside, 0.0).to(tl.float32)
        J = tl.load(J_start + at_segment * V + in_state, inside, 0.0).to(tl.float32)
    else:
        M = tl.zeros((PK, BV), tl.float32)
        J = tl.zeros((PK, BV), tl.float32)
    operand = k.dtype.element_ty
    if operand == tl.float16:  # squares of keys leave its range
        operand = tl.float32
    kept = 0.0
    for t in range(first, stop, 64):
        if not SUMMARY:
            at_chunk = (m * HV + head) * K * V
            tl.store(M_out + at_chunk + in_state, M, inside)
            tl.store(J_out + at_chunk + in_state, J, inside)
        count = (stop - t).to(tl.int32)
        live = i < count
        decay = tl.cumsum(clamp_decay(load_gate(g, t, live, head, HV, HEADS_G)), 0)
        total = tl.sum(tl.where(i == tl.minimum(count, 64) - 1, decay, 0.0), 0)
        at_key = (t * (HV // HEADS_K) + head // HEADS_K) * K + i[:, None] * (HV // HEADS_K * K) + c[None, :]
        keys = tl.load(k + at_key, live[:, None] & (c < K)[None, :], 0.0)
        narrow = live[:, None] & (column < V)[None, :]
        kept_to_end = tl.where(live, tl.exp2(total - decay), 0.0)[:, None]
        values = tl.load(v + (t * HV + head) * V + i[:, None] * (HV * V) + column[None, :], narrow, 0.0).to(tl.float32)
        at_gain = (
            (t * (HV // HEADS_BETA) + head // HEADS_BETA) * V + i[:, None] * (HV // HEADS_BETA * V) + column[None, :]
        )
        gains = tl.load(beta + at_gain, narrow, 0.0).to(tl.float32)
        squares = keys.to(tl.float32) * keys.to(tl.float32)
        written = values * kept_to_end
        M = tl.dot(tl.trans(keys.to(operand)), written.to(operand), tl.exp2(total) * M, input_precision=PRECISION)
        gains = (gains * kept_to_end).to(operand)
        J = tl.dot(tl.trans(squares.to(operand)), gains, tl.exp2(total) * J, input_precision=PRECISION)
        kept += total
        m += 1
    if SUMMARY:
        tl.store(M_out + at_segment * V + in_state, M, inside)
        tl.store(J_out + at_segment * V + in_state, J, inside)
        if part == 0:
            tl.store(transition + at_segment + c, tl.zeros((PK,), tl.float32) + kept, c < K)
