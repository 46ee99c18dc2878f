"""With a refresh: r and d of all tokens, from A at the chunks' starts, and A_t b_t by them. See the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import any_so_far, is_bad, zero_where
from ..common.packing import live_tokens, program_chunk
from ..common.tiles import load_gate, load_rows, row_places
from .sums import exact_dot, load_float_rows, load_matrix, precise_dot


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
    added = load_gate(refresh, first, live, 0, 1, 1)
    before = tl.cumsum(added, 0) - added
    for c0 in range(0, K, BK):
        c = c0 + part
        found = tl.zeros((64, BK), tl.float32)
        for r0 in range(0, K, BK):
            U = load_finite_rows(u, first, live, head, HV, r0 + part, K, HEADS)
            found = exact_dot(U, load_matrix(A, matrix, r0 + part, c, K), found, PRECISION)
        U = load_finite_rows(u, first, live, head, HV, c, K, HEADS)
        found += before[:, None] * U.to(tl.float32)
        at, here = row_places(first, live, head, HV, c, K, 1)
        tl.store(W + at, found, here)
        products = exact_dot(U, tl.trans(found), products, PRECISION)
    # U A U^T with what the earlier of two tokens finds
    products = tl.where(i[:, None] > i[None, :], products, tl.trans(products))
    tl.store(S + matrix * 4096 + i[:, None] * 64 + i[None, :], products)


@triton.jit(do_not_specialize=["time"])
def token_rows(T, R, chunks, time, HV, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """R holds U A and is overwritten by T U A. T [M, HV, 64, 64]."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    part = tl.arange(0, BK)
    lower = tl.load(T + (m.to(tl.int64) * HV + head) * 4096 + i[:, None] * 64 + i[None, :])
    for c0 in range(0, K, BK):
        at, here = row_places(first, live, head, HV, c0 + part, K, 1)
        rows = precise_dot(lower, tl.load(R + at, here, 0.0), tl.zeros((64, BK), tl.float32), PRECISION)
        tl.debug_barrier()
        tl.store(R + at, rows, here)
