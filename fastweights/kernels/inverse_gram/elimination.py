"""A symmetric matrix, eliminated by blocks of 16 rows: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import is_bad
from ..packing import chunk_place

ROWS = tl.constexpr(16)
HALF = tl.constexpr(8)


@triton.jit
def scalars(at, stride: tl.constexpr):
    """Numbers [i, j], i >= j, of an [8, 8] in memory as scalars, column after column."""
    found = ()
    for j in tl.static_range(HALF):
        for i in tl.static_range(j, HALF):
            found += (tl.load(at + i * stride + j),)
    return found


@triton.jit
def vectors(at, c, stride: tl.constexpr):
    """Eight rows in memory, columns c, as a tuple."""
    found = ()
    for i in tl.static_range(HALF):
        found += (tl.load(at + i * stride + c),)
    return found


@triton.jit
def eliminate(products, rows, pivots, gains, OWN: tl.constexpr):
    """r_t <- r_t - sum_{j < t} w_j p_jt r_j, w_t = gain_t / d_t, d_t = gain_t p_tt, plus 1 with OWN, for eight `rows` r and their
    `pivots`, where `products` holds p_ij, i >= j. Returns both, d and w."""
    done, done_pivots, d, w = (), (), (), ()
    for t in tl.static_range(HALF):
        divisor = (1.0 if OWN else 0.0) + gains[t] * products[0]
        weight = gains[t] / divisor
        row, pivot = rows[0], pivots[0]
        left, left_pivots = (), ()
        for i in tl.static_range(1, HALF - t):
            factor = weight * products[i]
            left += (rows[i] - factor * row,)
            left_pivots += (pivots[i] - factor * pivot,)
        products = without_first(products, weight, HALF - t)
        done += (row,)
        done_pivots += (pivot,)
        d += (divisor,)
        w += (weight,)
        rows = left
        pivots = left_pivots
    return done, done_pivots, d, w


@triton.jit
def without_first(products, weight, COUNT: tl.constexpr):
    """The lower triangle of COUNT rows after its first column is eliminated: one row and column fewer."""
    rest = ()
    for j in tl.static_range(1, COUNT):
        factor = weight * products[j]
        for i in tl.static_range(j, COUNT):
            # column j begins after those before it, of COUNT, COUNT - 1, .. numbers
            rest += (products[j * COUNT - j * (j - 1) // 2 + i - j] - factor * products[i],)
    return rest


@triton.jit
def gains_of(gain, first, count, head, HV, HEADS: tl.constexpr):
    """Of eight tokens, as scalars; a bad gain counts as 0."""
    found = ()
    for k in tl.static_range(HALF):
        if gain is None:
            found += (1.0,)
        else:
            given = tl.load(gain + (first + k) * (HV // HEADS) + head // HEADS, k < count, 0.0).to(tl.float32)
            found += (tl.where(is_bad(given), 0.0, given),)
    return found


@triton.jit
def turned(rows, c, b, BEGIN: tl.constexpr):
    """Rows BEGIN to BEGIN + 7 of a block with -I in the place of its own columns b to b + 15."""
    found = ()
    own = (c >= b) & (c < b + ROWS)
    for i in tl.static_range(HALF):
        found += (tl.where(own, tl.where(c == b + BEGIN + i, -1.0, 0.0), rows[i]),)
    return found


@triton.jit
def factors_of(at, weights, stride: tl.constexpr):
    """How much of row j of the upper half row i of the lower one loses, j the faster."""
    found = ()
    for i in tl.static_range(HALF):
        for j in tl.static_range(HALF):
            found += (weights[j] * tl.load(at + j * stride + i),)
    return found


@triton.jit
def less(rows, upper, overlaps):
    """The lower half without the upper one."""
    found = ()
    for i in tl.static_range(HALF):
        row = rows[i]
        for j in tl.static_range(HALF):
            row -= overlaps[i * HALF + j] * upper[j]
        found += (row,)
    return found


@triton.jit
def store_rows(
    rows, divisors, weights, factors, out, D, c, place, first, count, head, HV,
    K: tl.constexpr, PK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Eight eliminated rows, from row `place` on: as factors of the product to come, and of tokens as rows of T, with their d."""
    for i in tl.static_range(HALF):
        tl.store(factors + i * PK + c, tl.sqrt(weights[i]) * rows[i])
        if TOKENS:
            token = place + i
            tl.store(out + token * K + c, tl.where(c <= token, -rows[i], 0.0), c < K)
            tl.store(D + (first + token) * HV + head, divisors[i], token < count)


@triton.jit(do_not_specialize=["time"])
def eliminate_blocks(
    matrix, out, D, gain, scratch, chunks, time, ridge, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS_GAIN: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """matrix, out [M, HV, K, K]: `out` is the inverse of `matrix`, whose prior counts as 2^-20 of the trace at least. TOKENS: K
    tokens with `matrix` U A U^T; `out` is the lower triangular T with r = T U A, and D [BT, HV] are the d. scratch [M, HV, 32
    PK + 256]."""
    m, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_place(chunks, m, time)
    if count == 0:
        return
    number = m.to(tl.int64) * HV + head
    at, scratch = number * K * K, scratch + number * (2 * ROWS * PK + ROWS * ROWS)
    factors, small = scratch + ROWS * PK, scratch + 2 * ROWS * PK
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
        gains = gains_of(gain, first + b, count - b, head, HV, HEADS_GAIN)
        given, pivots = vectors(scratch, c, PK), vectors(scratch + b, t, PK)
        upper, upper_pivots, divisors, weights = eliminate(
            scalars(scratch + b, PK), turned(given, c, b, 0), pivots, gains, TOKENS
        )
        store_rows(upper, divisors, weights, factors, out + at, D, c, b, first, count, head, HV, K, PK, TOKENS)
        for i in tl.static_range(HALF):
            tl.store(small + i * ROWS + t, upper_pivots[i])
        tl.debug_barrier()
        overlaps = factors_of(small + HALF, weights, ROWS)
        given, pivots = vectors(scratch + HALF * PK, c, PK), vectors(scratch + HALF * PK + b, t, PK)
        rows, pivots = less(turned(given, c, b, HALF), upper, overlaps), less(pivots, upper_pivots, overlaps)
        for i in tl.static_range(HALF):
            tl.store(small + (HALF + i) * ROWS + t, pivots[i])
        tl.debug_barrier()
        gains = gains_of(gain, first + b + HALF, count - b - HALF, head, HV, HEADS_GAIN)
        lower, lower_pivots, divisors, weights = eliminate(
            scalars(small + HALF * ROWS + HALF, ROWS), rows, pivots, gains, TOKENS
        )
        store_rows(
            lower, divisors, weights, factors + HALF * PK, out + at, D, c, b + HALF, first, count, head, HV, K, PK, TOKENS
        )  # fmt: skip
        tl.debug_barrier()
        left = tl.load(factors + t[None, :] * PK + r[:, None])
        right = tl.load(factors + t[:, None] * PK + c[None, :])
        of_block = ((c >= b) & (c < b + ROWS))[None, :] | ((r >= b) & (r < b + ROWS))[:, None]
        M = tl.dot(-left, right, tl.where(of_block, 0.0, M), input_precision=PRECISION)
    if not TOKENS:
        tl.store(out + at + r[:, None] * K + c[None, :], -M, inside)
