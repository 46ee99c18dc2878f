"""The inverse at the chunks' starts where tokens also add to it: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import is_bad, rows_of_tokens, without
from ..packing import pieces_of_sequence, tokens_of_sequence
from .sums import exact_dot, matrix_tile

COARSE = tl.constexpr(1e-2)  # how close Newton's iteration comes; the refinement gains this factor in every step
FINE = tl.constexpr(2e-5)  # how close the refinement comes before its last step
MOST_STEPS = tl.constexpr(14)  # of either


@triton.jit
def row_sums(x):
    """The largest sum of the absolute values of a row: no eigenvalue is larger."""
    return tl.max(tl.sum(tl.abs(x), 1), 0)


@triton.jit
def inverse_by_newton(M):
    """Roughly the inverse of a symmetric matrix whose eigenvalues are at least 1, by Newton's iteration X <- X + (I - X M) X in
    tf32; and whether it came close. It starts from X = c I, whose step takes no product."""
    i = tl.arange(0, M.shape[0])
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    scale = 2.0 / (1.0 + row_sums(M))
    rest = identity - scale * M
    X = scale * (identity + rest)
    left, steps = row_sums(rest), 0
    left *= left
    while (left > COARSE) & (steps < MOST_STEPS):
        rest = identity - tl.dot(X, tl.trans(M), input_precision="tf32")
        X = tl.dot(rest, tl.trans(X), X, input_precision="tf32")
        left, steps = row_sums(rest), steps + 1
        left *= left
    return X, left <= COARSE


@triton.jit
def solve_rows(M, rows, PRECISION: tl.constexpr):
    """rows M^-1 for a symmetric M, and whether it was found: what a rough inverse misses is computed in the precision of float32
    and solved for again. Right operands are symmetric, and transposed they lie in memory as products take them."""
    X, close = inverse_by_newton(M)
    found = tl.dot(rows, tl.trans(X), input_precision="tf32")
    left, steps = 1.0, 0
    whole = tl.maximum(tl.max(tl.max(tl.abs(rows), 1), 0), 1e-30)
    while (left > FINE) & (steps < MOST_STEPS):
        missed = rows - tl.dot(found, tl.trans(M), input_precision=PRECISION)
        found = tl.dot(missed, tl.trans(X), found, input_precision="tf32")
        left, steps = tl.max(tl.max(tl.abs(missed), 1), 0) / whole, steps + 1
    return found, close & (left <= FINE)


@triton.jit
def token_by_token(
    now, u, refresh, first, count, head, HV, c, K: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """A after `count` tokens, by Sherman and Morrison's formula; a bad number counts as 0."""
    identity = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    for t in range(0, count):
        row = tl.load(u + ((first + t) * (HV // HEADS) + head // HEADS) * K + c, c < K, 0.0)
        row = without(row, is_bad(row)).to(tl.float32)
        found, same = tl.sum(now * row[None, :], 1), tl.sum(now * row[:, None], 0)
        found /= 1.0 + tl.sum(found * row, 0)
        now += tl.load(refresh + first + t) * identity - found[:, None] * same[None, :]
    return now


@triton.jit(do_not_specialize=["time"])
def carry_inverse(
    u, refresh, start, A, end, cu_seqlens, time, HV,
    K: tl.constexpr, PK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A [M, HV, K, K] at every chunk's start from `start` [N, HV, K, K], and `end` after the last token. refresh [BT]."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, time)
    chunk, _ = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    i, c = tl.arange(0, TOKENS), tl.arange(0, PK)
    inside = (c < K)[:, None] & (c < K)[None, :]
    at = c[:, None] * K + c[None, :]
    place = (n.to(tl.int64) * HV + head) * K * K
    now = matrix_tile(start, n.to(tl.int64) * HV + head, c, c, K)
    now += spoil(now)
    following = rows_of_tokens(u, first, i < count, head, HV, c, K, HEADS)
    to_follow = tl.load(refresh + first + i, i < count, 0.0)
    for step in range(0, count, TOKENS):
        if step % 64 == 0:
            number = (chunk + step // 64).to(tl.int64) * HV + head
            tl.store(A + number * K * K + at, now, inside)
        given, added, after, live = following, to_follow, first + step + TOKENS, i < count - step - TOKENS
        following = rows_of_tokens(u, after, live, head, HV, c, K, HEADS)
        to_follow = tl.load(refresh + after + i, live, 0.0)
        U = without(given, is_bad(given))
        before = tl.cumsum(added, 0) - added
        rows = exact_dot(now, tl.trans(U), tl.zeros((PK, TOKENS), tl.float32), PRECISION)
        rows += before[None, :] * tl.trans(U.to(tl.float32))
        products = exact_dot(U, rows, tl.zeros((TOKENS, TOKENS), tl.float32), PRECISION)
        products = tl.where(i[:, None] > i[None, :], products, tl.trans(products))
        products += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        taken, found = solve_rows(products, rows, PRECISION)
        if found:
            now = tl.dot(-rows, tl.trans(taken), now, input_precision=PRECISION)
            now += tl.where(c[:, None] == c[None, :], tl.sum(added, 0), 0.0)
        else:  # weights far beyond those of the prior
            now = token_by_token(
                now, u, refresh, after - TOKENS, tl.minimum(count - step, TOKENS), head, HV, c, K, HEADS
            )
        now += spoil(given)
    if end is not None:
        tl.store(end + place + at, now, inside)


@triton.jit
def spoil(x):
    """NaN where x holds a bad number, 0 otherwise."""
    return tl.where(tl.max(tl.max(is_bad(x).to(tl.int32), 1), 0) > 0, float("nan"), 0.0)
