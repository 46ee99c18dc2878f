"""A symmetric matrix, eliminated by blocks of 16 rows: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import is_bad, zero_where
from ..common.packing import program_chunk
from .rows import ROWS, eliminate_rows


@triton.jit(do_not_specialize=["time"])
def eliminate_blocks(
    matrix, out, D, gain, scratch, chunks, time, ridge, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS_GAIN: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """matrix, out [M, HV, K, K]: `out` is the inverse of `matrix`, whose prior counts as 2^-20 of the trace at least. TOKENS: K
    tokens with `matrix` U A U^T; `out` is the lower triangular T with r = T U A, and D [BT, HV] are the d. scratch [M, HV, 16
    PK]."""
    m, head, first, count, i, live = program_chunk(chunks, time)
    if count == 0:
        return
    number = m.to(tl.int64) * HV + head
    at, scratch = number * K * K, scratch + number * (ROWS * PK)
    r, c, t = tl.arange(0, PK), tl.arange(0, PK), tl.arange(0, ROWS)
    inside = (r < K)[:, None] & (c < K)[None, :]
    M = tl.load(matrix + at + r[:, None] * K + c[None, :], inside, 0.0)
    if not TOKENS:
        diagonal = r[:, None] == c[None, :]
        trace = tl.sum(tl.sum(tl.where(diagonal, M, 0.0), 1), 0)
        M = tl.where(diagonal, tl.where((r >= K)[:, None], 1.0, M + tl.maximum(2.0**-20 * trace - ridge, 0.0)), M)
    for b in range(0, K, ROWS):
        tl.store(scratch + (r - b)[:, None] * PK + c[None, :], M, ((r >= b) & (r < b + ROWS))[:, None])
        tl.debug_barrier()
        rows = tl.load(scratch + t[:, None] * PK + c[None, :])
        gains = None
        if gain is not None:
            place = (first + b + t) * (HV // HEADS_GAIN) + head // HEADS_GAIN
            gains = tl.load(gain + place, b + t < count, 0.0).to(tl.float32)
            gains = zero_where(gains, is_bad(gains))
        turned, divisors, weights = eliminate_rows(tl.load(scratch + t[:, None] * PK + b + t[None, :]), gains, TOKENS)
        tl.debug_barrier()
        own = (c >= b) & (c < b + ROWS)
        rows = tl.where(own[None, :], tl.where(c[None, :] == (b + t)[:, None], -1.0, 0.0), rows)
        rows = tl.dot(tl.trans(turned), rows, input_precision=PRECISION)
        if TOKENS:
            lower = tl.where(c[None, :] <= (b + t)[:, None], -rows, 0.0)
            tl.store(out + at + (b + t)[:, None] * K + c[None, :], lower, (c < K)[None, :])
            tl.store(D + (first + b + t) * HV + head, divisors, b + t < count)
        rows *= tl.sqrt(weights)[:, None]
        of_block = own[None, :] | ((r >= b) & (r < b + ROWS))[:, None]
        M = tl.dot(-tl.trans(rows), rows, tl.where(of_block, 0.0, M), input_precision=PRECISION)
    if not TOKENS:
        tl.store(out + at + r[:, None] * K + c[None, :], -M, inside)
