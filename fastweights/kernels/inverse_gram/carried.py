"""The inverse at the chunks' starts where tokens also add to it: see the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import is_bad, rows_of_tokens, without
from ..packing import pieces_of_sequence, tokens_of_sequence
from .rows import ROWS, eliminate_rows
from .sums import exact_dot, matrix_tile


@triton.jit(do_not_specialize=["time"])
def carry_inverse(
    u, refresh, start, A, end, cu_seqlens, time, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A [M, HV, K, K] at every chunk's start from `start` [N, HV, K, K], and `end` after the last token. refresh [BT]."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, time)
    chunk, _ = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    t, c = tl.arange(0, ROWS), tl.arange(0, PK)
    inside = (c < K)[:, None] & (c < K)[None, :]
    at = c[:, None] * K + c[None, :]
    place = (n.to(tl.int64) * HV + head) * K * K
    now = matrix_tile(start, n.to(tl.int64) * HV + head, c, c, K)
    now += spoil(now)
    following = rows_of_tokens(u, first, t < count, head, HV, c, K, HEADS)
    to_follow = tl.load(refresh + first + t, t < count, 0.0)
    for step in range(0, count, ROWS):
        if step % 64 == 0:
            number = (chunk + step // 64).to(tl.int64) * HV + head
            tl.store(A + number * K * K + at, now, inside)
        given, added, after = following, to_follow, first + step + ROWS
        following = rows_of_tokens(u, after, t < count - step - ROWS, head, HV, c, K, HEADS)
        to_follow = tl.load(refresh + after + t, t < count - step - ROWS, 0.0)
        U = without(given, is_bad(given))
        before = tl.cumsum(added, 0) - added
        rows = exact_dot(U, now, tl.zeros((ROWS, PK), tl.float32), PRECISION) + before[:, None] * U.to(tl.float32)
        products = exact_dot(U, tl.trans(rows), tl.zeros((ROWS, ROWS), tl.float32), PRECISION)
        turned, divisors, weights = eliminate_rows(products, None, OWN=True)
        rows = tl.sqrt(weights)[:, None] * tl.dot(tl.trans(turned), rows, input_precision=PRECISION)
        now = tl.dot(-tl.trans(rows), rows, now, input_precision=PRECISION)
        now += tl.where(c[:, None] == c[None, :], tl.sum(added, 0), 0.0) + spoil(given)
    if end is not None:
        tl.store(end + place + at, now, inside)


@triton.jit
def spoil(x):
    """NaN where x holds a bad number, 0 otherwise."""
    return tl.where(tl.max(tl.max(is_bad(x).to(tl.int32), 1), 0) > 0, float("nan"), 0.0)
