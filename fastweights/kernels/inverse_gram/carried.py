"""Where tokens also add to A: the inverse at the chunks' starts, its adjoint, and the gradients of the tokens. See the head of
this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import is_bad, zero_where
from ..common.packing import live_tokens, pieces_of_sequence, program_chunk, tokens_of_sequence
from ..common.tiles import load_gate, load_rows, row_places
from .sums import exact_dot, load_divisors, load_float_rows, load_matrix, precise_dot, rounded_dot

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
        shared = tl.minimum(before[:, None], before[None, :])  # what the earlier of two tokens finds
        products = shared * exact_dot(U, tl.trans(U), tl.zeros((64, 64), tl.float32), PRECISION)
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


@triton.jit
def load_factor_rows(R, root, first, live, head, HV, columns, K: tl.constexpr):
    """Rows of Z."""
    return root[:, None] * load_float_rows(R, first, live, head, HV, columns, K, 1)


@triton.jit(do_not_specialize=["time"])
def chunk_adjoint(
    u, b, dy, refresh, R, D, T, adjoint, transition, written, direct, W, V, rest, chunks, time, HV,
    K: tl.constexpr, BK: tl.constexpr, HEADS: tl.constexpr, HEADS_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the tokens alone, without `adjoint`: E - I and N of the chunk, `transition` (transposed) and `written` [M, HV, K,
    K], and in `direct` dZ for F = 0; W is scratch [BT, HV, K]. With the adjoint of A at the chunk's end and `direct`: V and
    `rest`, from which `finish_gradients` finds du."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    part = tl.arange(0, BK)
    matrix = m.to(tl.int64) * HV + head
    root = tl.where(live, tl.rsqrt(load_divisors(D, first, live, head, HV)), 0.0)
    if adjoint is None:
        along_b, along_dy = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
        for c0 in range(0, K, BK):
            c = c0 + part
            Z = tl.trans(load_factor_rows(R, root, first, live, head, HV, c, K))
            B = load_float_rows(b, first, live, head, HV, c, K, HEADS_B)
            along_b = tl.dot(B, Z, along_b, input_precision=PRECISION)
            along_dy = tl.dot(
                load_float_rows(dy, first, live, head, HV, c, K, 1), Z, along_dy, input_precision=PRECISION
            )
        lower = i[:, None] >= i[None, :]
        along_b, along_dy = tl.trans(tl.where(lower, -along_b, 0.0)), tl.trans(tl.where(lower, -along_dy, 0.0))
    overlaps = tl.zeros((64, 64), tl.float32)
    for c0 in range(0, K, BK):
        c = c0 + part
        at, here = row_places(first, live, head, HV, c, K, 1)
        if adjoint is None:
            dZ = tl.dot(along_b, load_float_rows(dy, first, live, head, HV, c, K, 1), input_precision=PRECISION)
            dZ = tl.dot(
                along_dy, load_float_rows(b, first, live, head, HV, c, K, HEADS_B), dZ, input_precision=PRECISION
            )
            tl.store(direct + at, dZ, here)
        else:
            dZ = tl.load(direct + at, here, 0.0)
            for r0 in range(0, K, BK):
                r = r0 + part
                both = load_matrix(adjoint, matrix, c, r, K) + tl.trans(load_matrix(adjoint, matrix, r, c, K))
                Z = load_factor_rows(R, root, first, live, head, HV, r, K)
                dZ = tl.dot(-Z, tl.trans(both), dZ, input_precision=PRECISION)
        Z = load_factor_rows(R, root, first, live, head, HV, c, K)
        overlaps = tl.dot(dZ, tl.trans(Z), overlaps, input_precision=PRECISION)
        tl.store(W + at, dZ, here)
    tl.debug_barrier()
    scale = tl.where(i[:, None] > i[None, :], 1.0, tl.where(i[:, None] == i[None, :], 0.5, 0.0))
    overlaps *= scale
    overlaps += tl.trans(overlaps)
    lifted = root[:, None] * tl.load(T + matrix * 4096 + i[:, None] * 64 + i[None, :])  # L^-1
    products = tl.dot(overlaps, lifted, input_precision=PRECISION)
    products = -tl.dot(tl.trans(lifted), products, input_precision=PRECISION) * tl.trans(scale)
    added = load_gate(refresh, first, live, 0, 1, 1)
    before = tl.cumsum(added, 0) - added
    for c0 in range(0, K, BK):
        c = c0 + part
        at, here = row_places(first, live, head, HV, c, K, 1)
        U = load_float_rows(u, first, live, head, HV, c, K, HEADS)
        dW = tl.dot(tl.trans(lifted), tl.load(W + at, here, 0.0), input_precision=PRECISION)
        dW = tl.dot(products, U, dW, input_precision=PRECISION)
        if adjoint is None:
            tl.debug_barrier()
            tl.store(W + at, dW, here)
        else:
            tl.store(V + at, tl.dot(tl.trans(products), U, dW, input_precision=PRECISION), here)
            through = tl.dot(tl.trans(products), before[:, None] * U, before[:, None] * dW, input_precision=PRECISION)
            tl.store(rest + at, through, here)
    if adjoint is None:
        tl.debug_barrier()
        for c0 in range(0, K, BK):
            c = c0 + part
            U = load_float_rows(u, first, live, head, HV, c, K, HEADS)
            B = load_float_rows(b, first, live, head, HV, c, K, HEADS_B)
            X = tl.dot(lifted, U, input_precision=PRECISION)
            for r0 in range(0, K, BK):
                r = r0 + part
                at = matrix * K * K
                inside = (r < K)[:, None] & (c < K)[None, :]
                Z = tl.trans(load_factor_rows(R, root, first, live, head, HV, r, K))
                change = tl.dot(-Z, X, input_precision=PRECISION)
                tl.store(transition + at + c[None, :] * K + r[:, None], change, inside)
                found = tl.dot(
                    tl.trans(load_float_rows(dy, first, live, head, HV, r, K, 1)), B, input_precision=PRECISION
                )
                dW = tl.trans(load_float_rows(W, first, live, head, HV, r, K, 1))
                found = tl.dot(dW, U, found, input_precision=PRECISION)
                tl.store(written + at + r[:, None] * K + c[None, :], found, inside)


@triton.jit(do_not_specialize=["time"])
def carry_adjoint(
    start, transition, written, adjoint, end, cu_seqlens, time, HV,
    K: tl.constexpr, PK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """adjoint [M, HV, K, K]: the gradient of A at the end of every chunk. With E - I, which is small, a product adds the
    rounding of what changes: that of E, which cuts off in tf32, took .1% of the gradient in every chunk.
    start [N, HV, K, K] or None: the gradient of A after the last chunk. end: the gradient of A before the first."""
    n, head = tl.program_id(0), tl.program_id(1)
    chunk, count = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    c = tl.arange(0, PK)
    inside = (c < K)[:, None] & (c < K)[None, :]
    at = c[:, None] * K + c[None, :]
    place = n.to(tl.int64) * HV + head
    now = tl.zeros((PK, PK), tl.float32)
    if start is not None:
        now = load_matrix(start, place, c, c, K)
    for step in tl.range(0, count, num_stages=STAGES):  # E - I and N are loaded ahead
        number = (chunk + count - 1 - step).to(tl.int64) * HV + head
        tl.store(adjoint + number * K * K + at, now, inside)
        change = load_matrix(transition, number, c, c, K)  # transposed
        half = rounded_dot(change, now, now, PRECISION)
        now = half + load_matrix(written, number, c, c, K)
        now = rounded_dot(half, tl.trans(change), now, PRECISION)
    if end is not None:
        tl.store(end + place * K * K + at, now, inside)


@triton.jit(do_not_specialize=["time"])
def finish_gradients(A, V, rest, du, chunks, time, HV, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """du = V A + rest [BT, HV, K]."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    part = tl.arange(0, BK)
    matrix = m.to(tl.int64) * HV + head
    for c0 in range(0, K, BK):
        c = c0 + part
        found = load_float_rows(rest, first, live, head, HV, c, K, 1)
        for r0 in range(0, K, BK):
            rows = load_float_rows(V, first, live, head, HV, r0 + part, K, 1)
            found = tl.dot(rows, tl.trans(load_matrix(A, matrix, c, r0 + part, K)), found, input_precision=PRECISION)
        at, here = row_places(first, live, head, HV, c, K, 1)
        tl.store(du + at, found.to(du.dtype.element_ty), here)
