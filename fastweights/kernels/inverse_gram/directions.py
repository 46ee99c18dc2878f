"""With a refresh: A_t b_t of all tokens, from A at the chunks' starts. See the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import any_so_far, is_bad, zero_where
from ..common.packing import live_tokens, program_chunk
from ..common.tiles import load_gate, load_rows, row_places
from .sums import exact_dot, load_divisors, load_float_rows, load_matrix, precise_dot


@triton.jit
def find_bad_tokens(u, first, live, head, HV, K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr):
    """Whether a token of the chunk or one before it, in the chunk, has a NaN or an infinity."""
    bad = tl.arange(0, 64) < 0
    for c0 in range(0, K, BK):
        U = load_float_rows(u, first, live, head, HV, c0 + tl.arange(0, BK), K, HEADS)
        bad |= tl.max(is_bad(U).to(tl.int32), 1) > 0
    return any_so_far(bad)


@triton.jit
def load_finite_rows(x, first, live, head, HV, columns, K: tl.constexpr, HEADS: tl.constexpr):
    """As `load_rows`, with 0 in the place of bad numbers."""
    found = load_rows(x, first, live, head, HV, columns, K, HEADS)
    return zero_where(found, is_bad(found))


@triton.jit(do_not_specialize=["time"])
def solve_tokens(
    u, refresh, A, R, D, b, out, chunks, time, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_t = A_t b_t [BT, HV, K]."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    part = tl.arange(0, BK)
    matrix = m.to(tl.int64) * HV + head
    spoiled = find_bad_tokens(u, first, live, head, HV, K, BK, HEADS)
    scores = tl.zeros((64, 64), tl.float32)
    for c0 in range(0, K, BK):
        given = load_rows(b, first, live, head, HV, c0 + part, K, HEADS_B)
        spoiled |= tl.max(is_bad(given).to(tl.int32), 1) > 0
        rows = load_float_rows(R, first, live, head, HV, c0 + part, K, 1)
        scores = exact_dot(zero_where(given, is_bad(given)), tl.trans(rows), scores, PRECISION)
    scores *= -1.0 / load_divisors(D, first, live, head, HV)[None, :]
    scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
    for c0 in range(0, K, BK):
        rows = load_float_rows(R, first, live, head, HV, c0 + part, K, 1)
        x = precise_dot(scores, rows, tl.zeros((64, BK), tl.float32), PRECISION)
        for r0 in range(0, K, BK):
            B = load_finite_rows(b, first, live, head, HV, r0 + part, K, HEADS_B)
            x = exact_dot(B, tl.trans(load_matrix(A, matrix, c0 + part, r0 + part, K)), x, PRECISION)
        added = tl.cumsum(load_gate(refresh, first, live, 0, 1, 1), 0)
        x += added[:, None] * load_finite_rows(b, first, live, head, HV, c0 + part, K, HEADS_B).to(tl.float32)
        at, here = row_places(first, live, head, HV, c0 + part, K, 1)
        x = tl.where(spoiled[:, None], float("nan"), x)
        tl.store(out + at, x.to(out.dtype.element_ty), here)
