"""Where tokens also add to A: its adjoint, and the gradients of the tokens. See the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import live_tokens, pieces_of_sequence, program_chunk
from ..common.tiles import load_gate, row_places
from .sums import load_divisors, load_float_rows, load_matrix, rounded_dot


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
