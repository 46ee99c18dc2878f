"""A symmetric matrix, eliminated by blocks of 16 rows: see the head of this package.

One warp eliminates a block: lanes hold rows, and the columns are 16 vectors."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import is_bad, zero_where
from ..common.packing import program_chunk, program_segment

ROWS = tl.constexpr(16)


@triton.jit
def split_columns(x):
    """The columns of x [32, 16] as a tuple of vectors."""
    parts = (tl.reshape(x, (32, 2, 2, 2, 2)),)
    for _ in tl.static_range(4):  # from the lowest bit of a column's number to the highest
        even, odd = (), ()
        for k in tl.static_range(len(parts)):
            low, high = tl.split(parts[k])
            even += (low,)
            odd += (high,)
        parts = even + odd
    return parts


@triton.jit
def take_number(x, j: tl.constexpr):
    """Number j of a vector of 32, in all lanes."""
    return tl.gather(x, tl.full((32,), j, tl.int32), 0)


@triton.jit
def eliminate_rows(products, gains, OWN: tl.constexpr):
    """For rows r and p_ij = r_i.u_j, of which i >= j counts: r_t <- r_t - sum_{j < t} w_j p_tj r_j with d_t = gain_t p_tt, plus 1
    with OWN, and w_t = gain_t / d_t. products [32, 16]: p, and below it the identity, which takes the same steps. Returns the
    columns of both, T^T below, where T r are the new rows, and d and w [16]. gains [32], 1 when None."""
    i, t = tl.arange(0, 32), tl.arange(0, ROWS)
    left = split_columns(products)
    done, divisors, weights = (), tl.full((32,), 1.0, tl.float32), tl.full((32,), 0.0, tl.float32)
    for j in tl.static_range(ROWS):
        column, weight = left[0], 1.0
        divisor = take_number(column, j)
        if gains is not None:
            weight = take_number(gains, j)
            divisor *= weight
        if OWN:
            divisor += 1.0
        weight = weight / divisor
        divisors, weights = tl.where(i == j, divisor, divisors), tl.where(i == j, weight, weights)
        scaled = weight * column
        rest = ()
        for k in tl.static_range(1, ROWS - j):
            rest += (left[k] - take_number(column, j + k) * scaled,)
        done += (column,)
        left = rest
    return done, tl.gather(divisors, t, 0), tl.gather(weights, t, 0)


@triton.jit
def eliminate(
    M, out, D, gain, scratch, first, count, head, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS_GAIN: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-M^-1 of M [PK, PK]. TOKENS: K tokens with M = U A U^T; `out` [K, K] takes the lower triangular T with r = T U A, and D
    [BT, HV] the d. scratch: 16 PK + 512 numbers of the program."""
    r, c, t, both = tl.arange(0, PK), tl.arange(0, PK), tl.arange(0, ROWS), tl.arange(0, 32)
    done = scratch + ROWS * PK
    for b in range(0, K, ROWS):
        tl.store(scratch + (r - b)[:, None] * PK + c[None, :], M, ((r >= b) & (r < b + ROWS))[:, None])
        tl.debug_barrier()
        identity = tl.where(both[:, None] - ROWS == t[None, :], 1.0, 0.0)
        products = tl.load(scratch + both[:, None] * PK + b + t[None, :], (both < ROWS)[:, None], identity)
        gains = None
        if gain is not None:
            place = (first + b + both) * (HV // HEADS_GAIN) + head // HEADS_GAIN
            gains = tl.load(gain + place, (both < ROWS) & (b + both < count), 0.0).to(tl.float32)
            gains = zero_where(gains, is_bad(gains))
        columns, divisors, weights = eliminate_rows(products, gains, TOKENS)
        for j in tl.static_range(ROWS):
            tl.store(done + both * ROWS + j, columns[j])
        tl.debug_barrier()
        turned = tl.load(done + both[:, None] * ROWS + t[None, :])
        rows = tl.load(scratch + (both - ROWS)[:, None] * PK + c[None, :], (both >= ROWS)[:, None], 0.0)
        tl.debug_barrier()
        own = (c >= b) & (c < b + ROWS)
        rows = tl.where(own[None, :], tl.where(c[None, :] - b == both[:, None] - ROWS, -1.0, 0.0), rows)
        rows = tl.dot(tl.trans(turned), rows, input_precision=PRECISION)
        if TOKENS:
            lower = tl.where(c[None, :] <= (b + t)[:, None], -rows, 0.0)
            tl.store(out + (b + t)[:, None] * K + c[None, :], lower, (c < K)[None, :])
            tl.store(D + (first + b + t) * HV + head, divisors, b + t < count)
        rows *= tl.sqrt(weights)[:, None]
        is_block = own[None, :] | ((r >= b) & (r < b + ROWS))[:, None]
        M = tl.dot(-tl.trans(rows), rows, tl.where(is_block, 0.0, M), input_precision=PRECISION)
    return M


@triton.jit(do_not_specialize=["time"])
def invert_sums(
    sums, out, scratch, segments, time, ridge, HV,
    K: tl.constexpr, PK: tl.constexpr, LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [M, HV, K, K]: for the first chunk of every segment the inverse of `sums` [P, HV, K, K], whose prior counts as 2^-20 of
    the trace at least. scratch [P, HV, 16 PK + 512]."""
    p, head, first, count, chunk = program_segment(segments, time, LENGTH)
    if count == 0:
        return
    number = p.to(tl.int64) * HV + head
    r, c = tl.arange(0, PK), tl.arange(0, PK)
    inside = (r < K)[:, None] & (c < K)[None, :]
    M = tl.load(sums + number * K * K + r[:, None] * K + c[None, :], inside, 0.0)
    diagonal = r[:, None] == c[None, :]
    trace = tl.sum(tl.sum(tl.where(diagonal, M, 0.0), 1), 0)
    M = tl.where(diagonal, tl.where((r >= K)[:, None], 1.0, M + tl.maximum(2.0**-20 * trace - ridge, 0.0)), M)
    M = eliminate(
        M, out, None, None, scratch + number * (ROWS * PK + 512), first, count, head, HV, K, PK, 1, False, PRECISION
    )  # fmt: skip
    tl.store(out + (chunk * HV + head) * K * K + r[:, None] * K + c[None, :], -M, inside)


@triton.jit(do_not_specialize=["time"])
def eliminate_tokens(products, T, D, scratch, chunks, time, HV, PRECISION: tl.constexpr):
    """T [M, HV, 64, 64] and D [BT, HV] of a chunk's tokens from `products` U A U^T [M, HV, 64, 64]. scratch [M, HV, 1536]."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    number = m.to(tl.int64) * HV + head
    at = number * 4096
    i = tl.arange(0, 64)
    M = tl.load(products + at + i[:, None] * 64 + i[None, :])
    eliminate(M, T + at, D, None, scratch + number * 1536, first, count, head, HV, 64, 64, 1, True, PRECISION)
