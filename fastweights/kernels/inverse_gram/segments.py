"""All tokens of a segment, chunk after chunk: r, d and A_t b_t, and backwards their gradients with H on chip. See the head of
this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import any_so_far, is_bad, zero_where
from ..common.packing import live_tokens, program_chunk, program_segment
from ..common.tiles import load_gate, load_tile, tile_address
from .elimination import eliminate
from .sums import dot_in_two, exact_dot, load_divisors, load_matrix, precise_dot


@triton.jit
def load_tokens(x, first, live, head, HV, columns, K: tl.constexpr, HEADS: tl.constexpr):
    """As `load_rows`, with small offsets."""
    here = live[:, None] & (columns < K)[None, :]
    return load_tile(x, first, here, head, HV, columns, K, HEADS)


@triton.jit
def store_tokens(x, values, first, live, head, HV, columns, K: tl.constexpr):
    """Write [tokens, columns] of x [BT, HV, K]."""
    here = live[:, None] & (columns < K)[None, :]
    tl.store(tile_address(x, first, head, HV, columns, K, 1), values.to(x.dtype.element_ty), here)


@triton.jit
def bad_tokens(U, gain, first, live, head, HV, HEADS_GAIN: tl.constexpr):
    """Whether a token of the chunk, of rows U, or one before it, in the chunk, has a NaN or an infinity."""
    bad = tl.max(is_bad(U).to(tl.int32), 1) > 0
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
def times_rows(
    A, matrix, x, first, live, head, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A x^T [PK, 64] of a chunk's tokens, of which bad numbers count as 0."""
    BK: tl.constexpr = min(PK, 64)
    r, part = tl.arange(0, PK), tl.arange(0, BK)
    tiles, rows = (), ()
    for c0 in tl.static_range(0, K, BK):  # all are on their way before the first is waited for
        tiles += (load_matrix(A, matrix, r, c0 + part, K),)
        rows += (load_tokens(x, first, live, head, HV, c0 + part, K, HEADS),)
    out = tl.zeros((PK, 64), tl.float32)
    for k in tl.static_range(len(tiles)):
        out = exact_dot(tiles[k], tl.trans(zero_where(rows[k], is_bad(rows[k]))), out, PRECISION)
    return out


@triton.jit
def solve_rows_of_chunk(
    x, A, matrix, R, weights, first, live, head, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A_t x_t of a chunk's tokens, transposed [PK, 64], and which x_t have bad numbers [64]."""
    BK: tl.constexpr = min(PK, 64)
    i, part = tl.arange(0, 64), tl.arange(0, BK)
    given, rows = (), ()
    for c0 in tl.static_range(0, K, BK):
        given += (load_tokens(x, first, live, head, HV, c0 + part, K, HEADS),)
        rows += (load_tokens(R, first, live, head, HV, c0 + part, K, 1),)
    scores = tl.zeros((64, 64), tl.float32)
    bad = i < 0
    for k in tl.static_range(len(given)):
        is_bad_number = is_bad(given[k])
        bad |= tl.max(is_bad_number.to(tl.int32), 1) > 0
        scores = exact_dot(zero_where(given[k], is_bad_number), tl.trans(rows[k]), scores, PRECISION)
    scores = tl.where(i[:, None] >= i[None, :], scores * -weights[None, :], 0.0)
    out = times_rows(A, matrix, x, first, live, head, HV, K, PK, HEADS, PRECISION)
    whole = load_tokens(R, first, live, head, HV, tl.arange(0, PK), K, 1)
    return precise_dot(tl.trans(whole), tl.trans(scores), out, PRECISION), bad


@triton.jit
def store_matrix(x, values, K: tl.constexpr, rows, columns):
    """Write [rows, columns] of the matrix [K, K] at x."""
    tl.store(x + (rows[:, None] * K + columns[None, :]), values, (rows < K)[:, None] & (columns < K)[None, :])


@triton.jit
def nan_where_bad(x):
    """NaN where x holds a bad number, 0 otherwise."""
    return tl.where(tl.max(tl.max(is_bad(x).to(tl.int32), 1), 0) > 0, float("nan"), 0.0)


@triton.jit(do_not_specialize=["time"])
def solve_segment(
    u, gain, A, R, D, y, T, scratch, segments, time,
    HV: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """R [BT, HV, K], D [BT, HV] and in y [BT, HV, K] or None gain_t A_t u_t. A [M, HV, K, K] has the inverse at the segments'
    first chunks, and takes that of the others. T [P, HV, 64, 64] and `scratch` [P, HV, 1536] are the program's own."""
    BK: tl.constexpr = min(PK, 64)
    p, head, first, count, chunk = program_segment(segments, time, LENGTH)
    i, c, part = tl.arange(0, 64), tl.arange(0, PK), tl.arange(0, BK)
    number = p.to(tl.int64) * HV + head
    T += number * 4096
    for done in range(0, count, 64):
        start, left = first + done, count - done
        live = i < left
        matrix = (chunk + done // 64) * HV + head
        rows = times_rows(A, matrix, u, start, live, head, HV, K, PK, HEADS, PRECISION)
        U = load_tokens(u, start, live, head, HV, c, K, HEADS)
        spoiled = bad_tokens(U, gain, start, live, head, HV, HEADS_GAIN)
        U = zero_where(U, is_bad(U))
        products = exact_dot(U, rows, tl.zeros((64, 64), tl.float32), PRECISION)
        eliminate(
            products, T, D, gain, scratch + number * 1536, start, left, head, HV, 64, 64, HEADS_GAIN, True, PRECISION
        )  # fmt: skip
        tl.debug_barrier()
        lower = tl.load(T + i[:, None] * 64 + i[None, :])
        rows = precise_dot(rows, tl.trans(lower), tl.zeros((PK, 64), tl.float32), PRECISION)
        store_tokens(R, tl.trans(rows), start, live, head, HV, c, K)
        weights = load_weights(gain, load_divisors(D, start, live, head, HV), start, live, head, HV, HEADS_GAIN)
        weighted = rows * weights[None, :]
        tl.debug_barrier()
        if y is not None:
            found = tl.trans(tl.where(spoiled[None, :], float("nan"), weighted))
            store_tokens(y, found, start, live, head, HV, c, K)
        if left > 64:
            next_at = A + (matrix + HV) * K * K
            ruin = tl.where(tl.max(spoiled.to(tl.int32), 0) > 0, float("nan"), 0.0)
            tiles, others = (), ()
            for c0 in tl.static_range(0, K, BK):
                tiles += (load_matrix(A, matrix, c, c0 + part, K),)
                others += (load_tokens(R, start, live, head, HV, c0 + part, K, 1),)
            for k in tl.static_range(len(tiles)):
                now = precise_dot(-weighted, others[k], tiles[k], PRECISION) + ruin
                store_matrix(next_at, now, K, c, k * BK + part)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["time"])
def solve_tokens(
    u, gain, refresh, A, R, D, b, out, chunks, time,
    HV: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr,
    HEADS_B: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From A at the chunks' starts out_t = A_t b_t [BT, HV, K] of a chunk, SCALED: gain_t A_t b_t."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    spoiled = bad_tokens(load_tokens(u, first, live, head, HV, c, K, HEADS), gain, first, live, head, HV, HEADS_GAIN)
    weights = load_weights(gain, load_divisors(D, first, live, head, HV), first, live, head, HV, HEADS_GAIN)
    matrix = m.to(tl.int64) * HV + head
    found, bad = solve_rows_of_chunk(b, A, matrix, R, weights, first, live, head, HV, K, PK, HEADS_B, PRECISION)
    if SCALED:
        found *= load_gate(gain, first, live, head, HV, HEADS_GAIN)[None, :]
    found = tl.trans(tl.where((spoiled | bad)[None, :], float("nan"), found))
    if refresh is not None:
        added = tl.cumsum(tl.load(refresh + first + i, live, 0.0), 0)
        given = load_tokens(b, first, live, head, HV, c, K, HEADS_B)
        found += added[:, None] * zero_where(given, is_bad(given)).to(tl.float32)
    store_tokens(out, found, first, live, head, HV, c, K)


@triton.jit(do_not_specialize=["time"])
def segment_gradients(
    u, gain, x, y, D, H, dy, du, dgain, db, segments, time,
    HV: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, HEADS_GAIN: tl.constexpr,
    SELF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du, db [BT, HV, K] and dgain [BT, HV], from the last chunk of a segment to the first, with H [P, HV, K, K] at the segments'
    ends. SELF: b is u, du holds both gradients, y counts as divided by D, and dy is the gradient of gain_t y_t."""
    WORK: tl.constexpr = x.dtype.element_ty
    p, head, first, count, _ = program_segment(segments, time, LENGTH)
    if count == 0:
        return
    i, c = tl.arange(0, 64), tl.arange(0, PK)
    later = i[:, None] >= i[None, :]
    chunks = (count + 63) // 64
    now = load_matrix(H, p.to(tl.int64) * HV + head, c, c, K)
    for step in range(0, chunks):
        done = (chunks - 1 - step) * 64
        start, live = first + done, i < count - done
        U = load_tokens(u, start, live, head, HV, c, K, HEADS).to(WORK)
        out = dot_in_two(now, tl.trans(U), tl.zeros((PK, 64), tl.float32), PRECISION)
        Y = load_tokens(y, start, live, head, HV, c, K, 1)
        if SELF:
            share = 1.0 / load_divisors(D, start, live, head, HV)
            grad_gain = share * tl.sum(Y * load_tokens(dy, start, live, head, HV, c, K, 1).to(tl.float32), 1)
            Y *= share[:, None]
        Y = Y.to(WORK)
        X = load_tokens(x, start, live, head, HV, c, K, 1)
        now = tl.dot(tl.trans(X), Y, now, input_precision=PRECISION)
        now = tl.dot(tl.trans(Y), X, now, input_precision=PRECISION)
        along_x = tl.where(later, tl.dot(X, tl.trans(U), input_precision=PRECISION), 0.0).to(WORK)
        along_y = tl.where(later, tl.dot(Y, tl.trans(U), input_precision=PRECISION), 0.0).to(WORK)
        out = tl.dot(tl.trans(Y), along_x, out, input_precision=PRECISION)
        out = -tl.trans(tl.dot(tl.trans(X), along_y, out, input_precision=PRECISION))
        if gain is not None:
            grad = 0.5 * tl.sum(U.to(tl.float32) * out, 1)
            if SELF:
                grad += grad_gain
            tl.store(dgain + start * HV + head + i * HV, grad, live)
            out *= load_gate(gain, start, live, head, HV, HEADS_GAIN)[:, None]
        if SELF:
            out += X.to(tl.float32)
        elif db is not None:
            store_tokens(db, X, start, live, head, HV, c, K)
        store_tokens(du, out, start, live, head, HV, c, K)
