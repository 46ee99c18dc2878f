"""r and d of all tokens, from A at the chunks' starts, and A_t b_t by them: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import any_so_far, is_bad, zero_where
from ..common.packing import program_chunk
from ..common.tiles import load_gate, load_rows, row_places
from .sums import exact_dot, load_divisors, load_float_rows, load_matrix, precise_dot


@triton.jit
def find_bad_tokens(
    u, gain, first, live, head, HV, K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr
):  # fmt: skip
    """Whether a token of the chunk or one before it, in the chunk, has a NaN or an infinity."""
    bad = tl.arange(0, 64) < 0
    for c0 in range(0, K, BK):
        U = load_float_rows(u, first, live, head, HV, c0 + tl.arange(0, BK), K, HEADS)
        bad |= tl.max(is_bad(U).to(tl.int32), 1) > 0
    if gain is not None:
        bad |= is_bad(load_gate(gain, first, live, head, HV, HEADS_GAIN))
    return any_so_far(bad)


@triton.jit
def load_weights(gain, divisors, first, live, head, HV, HEADS_GAIN: tl.constexpr):
    """w of the tokens of a chunk; a bad gain counts as 0."""
    if gain is None:
        weights = 1.0 / divisors
    else:
        gains = load_gate(gain, first, live, head, HV, HEADS_GAIN)
        weights = zero_where(gains, is_bad(gains)) / divisors
    return weights


@triton.jit
def load_finite_rows(x, first, live, head, HV, columns, K: tl.constexpr, HEADS: tl.constexpr):
    """As `load_rows`, with 0 in the place of bad numbers."""
    found = load_rows(x, first, live, head, HV, columns, K, HEADS)
    return zero_where(found, is_bad(found))


@triton.jit(do_not_specialize=["time"])
def token_products(
    u, refresh, A, W, S, chunks, time, HV, K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """W = U A [BT, HV, K], where tokens add to A what each finds of it, and S = W U^T [M, HV, 64, 64]."""
    m, head, first, count, i, live = program_chunk(chunks, time)
    if count == 0:
        return
    part = tl.arange(0, BK)
    matrix = m.to(tl.int64) * HV + head
    products = tl.zeros((64, 64), tl.float32)
    if refresh is not None:
        added = load_gate(refresh, first, live, 0, 1, 1)
        before = tl.cumsum(added, 0) - added
    for c0 in range(0, K, BK):
        c = c0 + part
        found = tl.zeros((64, BK), tl.float32)
        for r0 in range(0, K, BK):
            U = load_finite_rows(u, first, live, head, HV, r0 + part, K, HEADS)
            found = exact_dot(U, load_matrix(A, matrix, r0 + part, c, K), found, PRECISION)
        U = load_finite_rows(u, first, live, head, HV, c, K, HEADS)
        if refresh is not None:
            found += before[:, None] * U.to(tl.float32)
        at, here = row_places(first, live, head, HV, c, K, 1)
        tl.store(W + at, found, here)
        products = exact_dot(U, tl.trans(found), products, PRECISION)
    if refresh is not None:  # U A U^T with what the earlier of two tokens finds
        products = tl.where(i[:, None] > i[None, :], products, tl.trans(products))
    tl.store(S + matrix * 4096 + i[:, None] * 64 + i[None, :], products)


@triton.jit(do_not_specialize=["time"])
def token_rows(
    u, gain, T, D, R, y, chunks, time, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R holds U A and is overwritten by T U A; where y is given gain_t A_t u_t. T [M, HV, 64, 64], D [BT, HV]."""
    m, head, first, count, i, live = program_chunk(chunks, time)
    if count == 0:
        return
    part = tl.arange(0, BK)
    lower = tl.load(T + (m.to(tl.int64) * HV + head) * 4096 + i[:, None] * 64 + i[None, :])
    if y is not None:
        spoiled = find_bad_tokens(u, gain, first, live, head, HV, K, BK, HEADS, HEADS_GAIN)
        divisors = load_divisors(D, first, live, head, HV)
        weights = tl.where(spoiled, float("nan"), load_weights(gain, divisors, first, live, head, HV, HEADS_GAIN))
    for c0 in range(0, K, BK):
        c = c0 + part
        at, here = row_places(first, live, head, HV, c, K, 1)
        rows = precise_dot(lower, tl.load(R + at, here, 0.0), tl.zeros((64, BK), tl.float32), PRECISION)
        tl.debug_barrier()
        tl.store(R + at, rows, here)
        if y is not None:
            tl.store(y + at, (weights[:, None] * rows).to(y.dtype.element_ty), here)


@triton.jit(do_not_specialize=["time"])
def solve_tokens(
    u, gain, refresh, A, R, D, b, out, chunks, time, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr, HEADS_B: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_t = A_t b_t [BT, HV, K], SCALED: gain_t A_t b_t."""
    m, head, first, count, i, live = program_chunk(chunks, time)
    if count == 0:
        return
    part = tl.arange(0, BK)
    matrix = m.to(tl.int64) * HV + head
    spoiled = find_bad_tokens(u, gain, first, live, head, HV, K, BK, HEADS, HEADS_GAIN)
    scores = tl.zeros((64, 64), tl.float32)
    for c0 in range(0, K, BK):
        given = load_rows(b, first, live, head, HV, c0 + part, K, HEADS_B)
        spoiled |= tl.max(is_bad(given).to(tl.int32), 1) > 0
        rows = load_float_rows(R, first, live, head, HV, c0 + part, K, 1)
        scores = exact_dot(zero_where(given, is_bad(given)), tl.trans(rows), scores, PRECISION)
    divisors = load_divisors(D, first, live, head, HV)
    scores *= -load_weights(gain, divisors, first, live, head, HV, HEADS_GAIN)[None, :]
    scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
    for c0 in range(0, K, BK):
        rows = load_float_rows(R, first, live, head, HV, c0 + part, K, 1)
        x = precise_dot(scores, rows, tl.zeros((64, BK), tl.float32), PRECISION)
        for r0 in range(0, K, BK):
            B = load_finite_rows(b, first, live, head, HV, r0 + part, K, HEADS_B)
            x = exact_dot(B, tl.trans(load_matrix(A, matrix, c0 + part, r0 + part, K)), x, PRECISION)
        if refresh is not None:
            added = tl.cumsum(load_gate(refresh, first, live, 0, 1, 1), 0)
            x += added[:, None] * load_finite_rows(b, first, live, head, HV, c0 + part, K, HEADS_B).to(tl.float32)
        if SCALED:
            x *= load_gate(gain, first, live, head, HV, HEADS_GAIN)[:, None]
        at, here = row_places(first, live, head, HV, c0 + part, K, 1)
        x = tl.where(spoiled[:, None], float("nan"), x)
        tl.store(out + at, x.to(out.dtype.element_ty), here)
