"""Where tokens also add to A: its adjoint, and the gradients of the tokens. See the head of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import live_tokens, pieces_of_sequence, program_chunk
from ..common.tiles import load_gate
from .segments import load_tokens, store_matrix, store_tokens, times_rows
from .sums import dot_in_two, load_divisors, load_matrix, rounded_dot


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
