"""The inverse at the chunks' starts where tokens also add to it: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import is_bad, zero_where
from ..common.packing import pieces_of_sequence, tokens_of_sequence
from ..common.tiles import load_rows
from .sums import exact_dot, load_matrix, precise_dot

COARSE = tl.constexpr(5e-3)  # how close Newton's iteration comes
FINE = tl.constexpr(3e-5)  # how close the refinement comes: one step from there
ROUNDING = tl.constexpr(2.0**-10)  # of tf32: as far from the inverse it leads, times the largest eigenvalue
FAR = tl.constexpr(0.25)  # from there it takes too many steps


@triton.jit
def solve_rows(S, rows, PRECISION: tl.constexpr):
    """rows M^-1 for M = I + S, where S is symmetric and not negative, and whether it was found. Newton's X <- X + (I - X M) X
    finds X roughly, in tf32; what that misses of the rows is computed in the precision of float32 and solved for again. The
    norm of S bounds the eigenvalues and so says how many steps are enough: measuring the remainder costs as much as a
    product. The first step, from X = c I, takes none. Right operands are symmetric, and transposed they lie in memory as
    products take them."""
    i = tl.arange(0, S.shape[0])
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    largest = 1.0 + tl.sqrt(tl.sum(S * S))  # over both axes at once: `has_bad_number` says why
    M = S + identity
    scale = 2.0 / (1.0 + largest)
    close = largest * ROUNDING <= FAR  # not where a number is bad
    X = scale * (2.0 * identity - scale * M)
    left = (1.0 - scale) * (1.0 - scale)
    while close & (left > COARSE):
        rest = identity - tl.dot(X, tl.trans(M), input_precision="tf32")
        X = tl.dot(rest, tl.trans(X), X, input_precision="tf32")
        left *= left
    found = tl.dot(rows, tl.trans(X), input_precision="tf32")
    factor = tl.maximum(left, largest * ROUNDING)
    left = factor
    while close & (left > FINE):
        missed = precise_dot(-found, tl.trans(M), rows, PRECISION)
        found = tl.dot(missed, tl.trans(X), found, input_precision="tf32")
        left *= factor
    return found, close


@triton.jit
def update_by_tokens(now, u, refresh, first, count, head, HV, c, K: tl.constexpr, HEADS: tl.constexpr):
    """A after `count` tokens, by Sherman and Morrison's formula; a bad number counts as 0."""
    identity = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    for t in range(0, count):
        row = tl.load(u + ((first + t) * (HV // HEADS) + head // HEADS) * K + c, c < K, 0.0)
        row = zero_where(row, is_bad(row)).to(tl.float32)
        found, same = tl.sum(now * row[None, :], 1), tl.sum(now * row[:, None], 0)
        found /= 1.0 + tl.sum(found * row, 0)
        now += tl.load(refresh + first + t) * identity - found[:, None] * same[None, :]
    return now


@triton.jit(do_not_specialize=["time"])
def carry_inverse(
    u, refresh, start, A, end, cu_seqlens, time, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A [M, HV, K, K] at every chunk's start from `start` [N, HV, K, K], and `end` after the last token. refresh [BT]."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, time)
    chunk, chunks = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    i, c = tl.arange(0, 64), tl.arange(0, PK)
    inside = (c < K)[:, None] & (c < K)[None, :]
    at = c[:, None] * K + c[None, :]
    place = (n.to(tl.int64) * HV + head) * K * K
    now = load_matrix(start, n.to(tl.int64) * HV + head, c, c, K)
    now += nan_where_bad(now)
    for step in range(0, chunks):
        tl.store(A + ((chunk + step).to(tl.int64) * HV + head) * K * K + at, now, inside)
        token, left = first + step * 64, count - step * 64
        U = load_rows(u, token, i < left, head, HV, c, K, HEADS)
        added = tl.load(refresh + token + i, i < left, 0.0)
        before = tl.cumsum(added, 0) - added
        of_both = tl.minimum(before[:, None], before[None, :])  # what the earlier of two tokens finds
        products = of_both * exact_dot(U, tl.trans(U), tl.zeros((64, 64), tl.float32), PRECISION)
        rows = exact_dot(now, tl.trans(U), tl.zeros((PK, 64), tl.float32), PRECISION)
        products = exact_dot(U, rows, products, PRECISION)
        rows += before[None, :] * tl.trans(U.to(tl.float32))
        taken, found = solve_rows(products, rows, PRECISION)
        if found:
            now = precise_dot(-rows, tl.trans(taken), now, PRECISION)
            now += tl.where(c[:, None] == c[None, :], tl.sum(added, 0), 0.0)
        else:  # weights far beyond those of the prior, or bad numbers
            now = update_by_tokens(now, u, refresh, token, tl.minimum(left, 64), head, HV, c, K, HEADS)
            now += nan_where_bad(U)
    if end is not None:
        tl.store(end + place + at, now, inside)


@triton.jit
def nan_where_bad(x):
    """NaN where x holds a bad number, 0 otherwise."""
    return tl.where(tl.max(tl.max(is_bad(x).to(tl.int32), 1), 0) > 0, float("nan"), 0.0)
