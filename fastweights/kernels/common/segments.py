"""The states that the segments of a sequence start from, joined from what every segment adds."""

from __future__ import annotations

import triton
import triton.language as tl

from .packing import pieces_of_sequence


@triton.jit(do_not_specialize=["time", "length"])
def combine_segments(
    begin, added, transition, cu_seqlens, time, length, HV,
    K: tl.constexpr, PK: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, BACK: tl.constexpr, BEGUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- T S + R from segment to segment of a sequence (BACK: T^T, from the last): `added`, R per segment, is overwritten by
    the S that each segment begins with. Without DELTA T is a log decay (base 2) per channel, [P, HV, K]."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    part, sequence, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    low, count = pieces_of_sequence(cu_seqlens, sequence, time, length, 1)
    c = tl.arange(0, PK)
    column = part * BV + tl.arange(0, BV)
    inside = (c < K)[:, None] & (column < V)[None, :]
    at = (sequence.to(tl.int64) * HV + head) * K
    if BEGUN:
        S = tl.load(begin + (at + c)[:, None] * V + column[None, :], inside, 0.0).to(tl.float32)
    else:
        S = tl.zeros((PK, BV), tl.float32)
    for step in range(0, count):
        segment = (low + count - 1 - step) if BACK else (low + step)
        base = (segment.to(tl.int64) * HV + head) * K
        at_R = added + base * V + c[:, None] * V + column[None, :]
        R = tl.load(at_R, inside, 0.0)
        tl.store(at_R, S, inside)
        if DELTA:
            tl.debug_barrier()  # S is read back by parts, from other threads
            S = R
            for k0 in tl.static_range(0, K, BK):
                d = k0 + tl.arange(0, BK)
                part_of_S = tl.load(
                    added + base * V + d[:, None] * V + column[None, :], (d < K)[:, None] & (column < V)[None, :], 0.0
                )
                if BACK:
                    at_T = base * K + d[:, None] * K + c[None, :]
                    T = tl.trans(tl.load(transition + at_T, (d < K)[:, None] & (c < K)[None, :], 0.0))
                else:
                    at_T = base * K + c[:, None] * K + d[None, :]
                    T = tl.load(transition + at_T, (c < K)[:, None] & (d < K)[None, :], 0.0)
                S = tl.dot(T, part_of_S.to(T.dtype), S, input_precision=PRECISION)
            tl.debug_barrier()
        else:
            S = R + tl.exp2(tl.load(transition + base + c, c < K, 0.0))[:, None] * S
