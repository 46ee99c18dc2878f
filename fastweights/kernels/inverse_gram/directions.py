"""r and d of all tokens, from A at the chunks' starts, A_t b_t by them, and their gradients: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import any_so_far, is_bad, zero_where
from ..common.packing import live_tokens, program_chunk
from ..common.tiles import load_gate, load_rows, row_places
from .sums import exact_dot, load_divisors, load_float_rows, load_matrix, precise_dot


@triton.jit
def find_bad_tokens(
    u, gain, first, live, head, HV, K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr
):
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
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
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
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
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
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
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


@triton.jit(do_not_specialize=["time"])
def direction_gradients(
    u, gain, x, y, divisor, H, dy, du, dgain, db, chunks, time, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr, SELF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """du, db [BT, HV, K]; dgain [BT, HV]. SELF: b is u, du holds both gradients, y counts as divided by `divisor`, and dy is the
    gradient of gain_t y_t."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    part = tl.arange(0, BK)
    matrix = m.to(tl.int64) * HV + head
    along_x, along_y = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
    for c0 in range(0, K, BK):
        U = load_float_rows(u, first, live, head, HV, c0 + part, K, HEADS)
        X = load_float_rows(x, first, live, head, HV, c0 + part, K, 1)
        along_x = tl.dot(U, tl.trans(X), along_x, input_precision=PRECISION)
        Y = load_float_rows(y, first, live, head, HV, c0 + part, K, 1)
        along_y = tl.dot(U, tl.trans(Y), along_y, input_precision=PRECISION)
    later = i[:, None] <= i[None, :]
    if SELF:
        share = 1.0 / load_divisors(divisor, first, live, head, HV)
        along_x *= share[None, :]
        along_y *= share[None, :]
    along_x, along_y = tl.where(later, along_x, 0.0), tl.where(later, along_y, 0.0)
    grad_gain = tl.zeros((64,), tl.float32)
    for c0 in range(0, K, BK):
        c = c0 + part
        X = load_float_rows(x, first, live, head, HV, c, K, 1)
        out = tl.dot(along_y, X, input_precision=PRECISION)
        out = tl.dot(along_x, load_float_rows(y, first, live, head, HV, c, K, 1), out, input_precision=PRECISION)
        for r0 in range(0, K, BK):
            U = load_float_rows(u, first, live, head, HV, r0 + part, K, HEADS)
            out = tl.dot(U, tl.trans(load_matrix(H, matrix, c, r0 + part, K)), out, input_precision=PRECISION)
        out = -out
        if gain is not None:
            grad_gain += 0.5 * tl.sum(load_float_rows(u, first, live, head, HV, c, K, HEADS) * out, 1)
            if SELF:
                through = load_float_rows(dy, first, live, head, HV, c, K, 1) * load_float_rows(
                    y, first, live, head, HV, c, K, 1
                )
                grad_gain += share * tl.sum(through, 1)
            out *= load_gate(gain, first, live, head, HV, HEADS_GAIN)[:, None]
        at, here = row_places(first, live, head, HV, c, K, 1)
        if SELF:
            out += load_float_rows(x, first, live, head, HV, c, K, 1)
        elif db is not None:
            tl.store(db + at, load_float_rows(x, first, live, head, HV, c, K, 1).to(db.dtype.element_ty), here)
        tl.store(du + at, out.to(du.dtype.element_ty), here)
    if gain is not None:
        tl.store(dgain + first * HV + head + i * HV, grad_gain, live)
