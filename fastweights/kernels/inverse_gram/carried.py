"""Where tokens also add to A: its adjoint, and the gradients of the tokens. See the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import is_bad, zero_where
from ..common.packing import live_tokens, pieces_of_sequence, program_chunk, tokens_of_sequence
from ..common.tiles import load_gate, load_rows
from .segments import load_tokens, nan_where_bad, store_matrix, store_tokens, times_rows
from .sums import dot_in_two, exact_dot, load_divisors, load_matrix, precise_dot, rounded_dot

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
def lower_triangle(x):
    """With half of the diagonal."""
    i = tl.arange(0, 64)
    return x * tl.where(i[:, None] > i[None, :], 1.0, tl.where(i[:, None] == i[None, :], 0.5, 0.0))


@triton.jit
def through_factor(dZ, Z, U, T, root, WORK: tl.constexpr, PRECISION: tl.constexpr):
    """dW [64, PK] and C [64, 64] of a chunk from dZ, and L^-1 - I. T: of the chunk [64, 64]; L^-1 is T over the roots of d."""
    i = tl.arange(0, 64)
    overlaps = lower_triangle(tl.dot(dZ.to(WORK), tl.trans(Z), input_precision=PRECISION))
    overlaps += tl.trans(overlaps)
    lifted = root[:, None] * tl.load(T + i[:, None] * 64 + i[None, :])
    products = tl.dot(overlaps, lifted, input_precision=PRECISION)
    products = tl.dot(tl.trans(lifted), products, input_precision=PRECISION)
    C = -tl.trans(lower_triangle(products))
    change = (lifted - tl.where(i[:, None] == i[None, :], 1.0, 0.0)).to(WORK)
    # In a product with L^-1 itself dZ would be rounded.
    dW = tl.dot(tl.trans(change), dZ.to(WORK), dZ, input_precision=PRECISION)
    return tl.dot(C.to(WORK), U, dW, input_precision=PRECISION), C, change


@triton.jit(do_not_specialize=["time"])
def chunk_adjoint(
    u, b, dy, R, D, T, transition, written, direct, chunks, time,
    HV: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, HEADS_B: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From the tokens alone: E - I of the chunk, transposed, in `transition`, N + N^T in `written` [M, HV, K, K], and in `direct`
    [BT, HV, K] dZ for F = 0."""
    WORK: tl.constexpr = tl.bfloat16 if u.dtype.element_ty == tl.bfloat16 else tl.float32
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    matrix = m.to(tl.int64) * HV + head
    root = tl.where(live, tl.rsqrt(load_divisors(D, first, live, head, HV)), 0.0)
    Z = (root[:, None] * load_tokens(R, first, live, head, HV, c, K, 1)).to(WORK)
    B = load_tokens(b, first, live, head, HV, c, K, HEADS_B).to(WORK)
    dY = load_tokens(dy, first, live, head, HV, c, K, 1).to(tl.float32)
    lower = i[:, None] >= i[None, :]
    along_b = tl.where(lower, -tl.dot(B, tl.trans(Z), input_precision=PRECISION), 0.0).to(WORK)
    along_dy = tl.where(lower, -tl.dot(dY.to(WORK), tl.trans(Z), input_precision=PRECISION), 0.0).to(WORK)
    dZ = tl.dot(tl.trans(along_b), dY.to(WORK), input_precision=PRECISION)
    dZ = tl.dot(tl.trans(along_dy), B, dZ, input_precision=PRECISION)
    store_tokens(direct, dZ, first, live, head, HV, c, K)
    U = load_tokens(u, first, live, head, HV, c, K, HEADS).to(WORK)
    dW, _, change = through_factor(dZ, Z, U, T + matrix * 4096, root, WORK, PRECISION)
    lifted = tl.dot(change, U, U.to(tl.float32), input_precision=PRECISION).to(WORK)
    E = tl.dot(-tl.trans(lifted), Z, input_precision=PRECISION)
    store_matrix(transition + matrix * K * K, E.to(transition.dtype.element_ty), K, c, c)
    # Loaded again: in float32 shared memory has no room for 128 channels of all operands at once.
    B = load_tokens(b, first, live, head, HV, c, K, HEADS_B).to(WORK)
    dY = load_tokens(dy, first, live, head, HV, c, K, 1).to(tl.float32)
    N = dot_in_two(tl.trans(dY), B, tl.zeros((PK, PK), tl.float32), PRECISION)
    N = dot_in_two(tl.trans(B), dY, N, PRECISION)
    N = dot_in_two(tl.trans(dW), U, N, PRECISION)
    N = dot_in_two(tl.trans(U), dW, N, PRECISION)
    store_matrix(written + matrix * K * K, N, K, c, c)


@triton.jit(do_not_specialize=["time"])
def carry_adjoint(
    start, transition, written, adjoint, end, cu_seqlens, time, HV,
    K: tl.constexpr, PK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """adjoint [M, HV, K, K]: the gradient of A at the end of every chunk. With E - I, which is small, a product adds the
    rounding of what changes: that of E, which cuts off in tf32, took .1% of the gradient in every chunk.
    start [N, HV, K, K] or None: the gradient of A after the last chunk. end: the gradient of A before the first. What goes from
    chunk to chunk is F + F^T, as is what `written` adds."""
    n, head = tl.program_id(0), tl.program_id(1)
    chunk, count = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    c = tl.arange(0, PK)
    inside = (c < K)[:, None] & (c < K)[None, :]
    at = c[:, None] * K + c[None, :]
    place = n.to(tl.int64) * HV + head
    now = tl.zeros((PK, PK), tl.float32)
    if start is not None:
        now = load_matrix(start, place, c, c, K)
        now += tl.trans(now)
    for step in tl.range(0, count, num_stages=STAGES):  # E - I and N are loaded ahead
        number = (chunk + count - 1 - step).to(tl.int64) * HV + head
        tl.store(adjoint + number * K * K + at, now, inside)
        change = load_matrix(transition, number, c, c, K)  # transposed
        half = rounded_dot(change, now, now, PRECISION)
        now = half + load_matrix(written, number, c, c, K)
        now = rounded_dot(half, tl.trans(change), now, PRECISION)
    if end is not None:
        tl.store(end + place * K * K + at, 0.5 * now, inside)


@triton.jit(do_not_specialize=["time"])
def finish_gradients(
    u, refresh, A, R, D, T, adjoint, direct, du, chunks, time,
    HV: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du [BT, HV, K] from `direct` and the adjoint of A at the chunk's end, of which `adjoint` is F + F^T."""
    WORK: tl.constexpr = tl.bfloat16 if u.dtype.element_ty == tl.bfloat16 else tl.float32
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    matrix = m.to(tl.int64) * HV + head
    root = tl.where(live, tl.rsqrt(load_divisors(D, first, live, head, HV)), 0.0)
    dZ = times_rows(adjoint, matrix, R, first, live, head, HV, K, PK, 1, PRECISION) * -root[None, :]
    dZ = load_tokens(direct, first, live, head, HV, c, K, 1) + tl.trans(dZ)
    Z = (root[:, None] * load_tokens(R, first, live, head, HV, c, K, 1)).to(WORK)
    U = load_tokens(u, first, live, head, HV, c, K, HEADS).to(WORK)
    dW, C, _ = through_factor(dZ, Z, U, T + matrix * 4096, root, WORK, PRECISION)
    turned = tl.trans(C).to(WORK)
    V = tl.dot(turned, U, dW, input_precision=PRECISION)
    out = tl.trans(tl.dot(load_matrix(A, matrix, c, c, K), tl.trans(V), input_precision=PRECISION))
    added = load_gate(refresh, first, live, 0, 1, 1)
    before = tl.cumsum(added, 0) - added
    out = tl.dot(turned, (before[:, None] * U.to(tl.float32)).to(WORK), out, input_precision=PRECISION)
    store_tokens(du, out + before[:, None] * dW, first, live, head, HV, c, K)
