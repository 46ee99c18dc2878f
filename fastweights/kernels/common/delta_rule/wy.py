"""WY transform: given the state S at a chunk's start, the tokens of the chunk write U - W S (see the head of this package).

    A = tril(diag(beta) (K exp(G)) (KW exp(-G))^T, -1),  T = (I + A)^-1,  U = T diag(beta) V,  W = T diag(beta) K exp(G)

T is found by blocks of 16 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import any_so_far, clamp_decay, has_bad_number, is_bad, zero_where
from ..packing import chunk_place, live_tokens, program_chunk
from ..tiles import load_gate, load_tile


@triton.jit
def unit_lower_inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular [64, 64]: X holds the inverses of the diagonal blocks of 16. With
    N = X times the blocks below the diagonal, where N^4 = 0, (I + A)^-1 = (I + N)^-1 X = (I + N^2)(I - N) X."""
    token = tl.arange(0, 64)
    own = (token // 16)[:, None] == tl.arange(0, 4)[None, :]
    blocks = tl.sum(tl.where(own[:, :, None], tl.reshape(A, (64, 4, 16)), 0.0), 1)
    X = tl.reshape(inverse_of_blocks(tl.reshape(blocks, (4, 16, 16))), (64, 1, 16))
    X = tl.reshape(tl.where(own[:, :, None], X, 0.0), (64, 64))
    below = tl.where((token // 16)[:, None] == (token // 16)[None, :], 0.0, A)
    N = tl.dot(X, below, input_precision=PRECISION)
    T = X - tl.dot(N, X, input_precision=PRECISION)
    return T + tl.dot(tl.dot(N, N, input_precision=PRECISION), T, input_precision=PRECISION)


@triton.jit
def inverse_of_blocks(D):
    """(I + D)^-1 of four strictly lower triangular [16, 16]: blocks of 8 as (I - E)(I + E^2)(I + E^4), whose factors stay small
    even where all keys are the same, then pairs of blocks. In full float32."""
    zero = tl.zeros((4, 16, 16), tl.float32)
    row = zero.to(tl.int32) + tl.arange(0, 16)[None, :, None]
    column = zero.to(tl.int32) + tl.arange(0, 16)[None, None, :]
    near = row // 8 == column // 8
    one = tl.where(row == column, 1.0, 0.0)
    E = tl.where(near, D, 0.0)
    E2 = tl.dot(E, E, input_precision="tf32x3")
    X = (one - E) + tl.dot(one - E, E2, input_precision="tf32x3")
    X += tl.dot(X, tl.dot(E2, E2, input_precision="tf32x3"), input_precision="tf32x3")
    N = tl.dot(X, tl.where(near, 0.0, D), input_precision="tf32x3")
    return X - tl.dot(N, X, input_precision="tf32x3")


@triton.jit
def causal_inverse(A, bad, PRECISION: tl.constexpr):
    """(I + A)^-1, where a NaN or infinity in A, or a row marked `bad`, makes its row and the following ones NaN, none before."""
    spoiled = any_so_far(is_bad(tl.sum(A, 1)) | bad)[:, None]
    return tl.where(spoiled, float("nan"), unit_lower_inverse(tl.where(spoiled, 0.0, A), PRECISION))


@triton.jit(do_not_specialize=["time"])
def wy_transform(
    k, write_key, v, beta, g, inverse, W, U, G, chunks, time,
    H, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HEADS_G: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_W: tl.constexpr,
    WRITE: tl.constexpr, DECAY: tl.constexpr, REUSE_SAVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. Heads of gates and write keys are given as HV // heads. REUSE_SAVED: T, U and G are
    given, and only W is computed. Products with T are taken in the precision of U."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    at_keys = k + (first * H + head // (HV // H)) * K + i[:, None] * (H * K)
    gain = load_gate(beta, first, live, head, HV, HEADS_BETA)
    if DECAY:
        if REUSE_SAVED:
            decay = tl.load(G + start + row, live, 0.0)
        else:
            decay = tl.cumsum(clamp_decay(load_gate(g, first, live, head, HV, HEADS_G)), 0)
            tl.store(G + start + row, decay, live)
    at_T = inverse + start * 64 + row[:, None] * 64 + i[None, :]
    if REUSE_SAVED:
        T = tl.load(at_T, live[:, None], 0.0).to(tl.float32)
    else:
        A = tl.zeros((64, 64), tl.float32)
        for k0 in tl.static_range(0, K, BK):
            c = k0 + tl.arange(0, BK)
            here = live[:, None] & (c < K)[None, :]
            keys = tl.load(at_keys + c[None, :], here, 0.0)
            if WRITE:
                writes = load_tile(write_key, first, here, head, HV, c, K, HEADS_W)
                A = tl.dot(keys, tl.trans(writes), A, input_precision=PRECISION)
            else:
                A = tl.dot(keys, tl.trans(keys), A, input_precision=PRECISION)
        A *= gain[:, None]
        if DECAY:
            A *= tl.exp2(tl.where(i[:, None] > i[None, :], decay[:, None] - decay[None, :], 0.0))
        A = tl.where((i[:, None] > i[None, :]) & live[:, None], A, 0.0)
        T = causal_inverse(A, is_bad(gain), PRECISION)
        tl.store(at_T, T.to(inverse.dtype.element_ty), live[:, None])

    T = tl.where(i[:, None] >= i[None, :], T, 0.0)
    row_bad = is_bad(tl.sum(T, 1))
    if not REUSE_SAVED:
        for v0 in tl.static_range(0, V, BV):
            c = v0 + tl.arange(0, BV)
            at = row[:, None] * V + c[None, :]
            here = live[:, None] & (c < V)[None, :]
            values = tl.load(v + start * V + at, here, 0.0).to(U.dtype.element_ty)
            u = weigh_rows(T, gain, values, row_bad, False, False, PRECISION)
            tl.store(U + start * V + at, u.to(U.dtype.element_ty), here)
    scale = gain
    if DECAY:
        scale *= tl.exp2(decay)
    for k0 in tl.static_range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        here = live[:, None] & (c < K)[None, :]
        keys = tl.load(at_keys + c[None, :], here, 0.0).to(U.dtype.element_ty)
        w = weigh_rows(T, scale, keys, row_bad, REUSE_SAVED, True, PRECISION)
        tl.store(W + start * K + row[:, None] * K + c[None, :], w.to(W.dtype.element_ty), here)


@triton.jit
def weigh_rows(T, scale, x, row_bad, TRUSTED: tl.constexpr, WHOLE: tl.constexpr, precision: tl.constexpr):
    """T diag(scale) x for a lower triangular T. Unless TRUSTED, a NaN or infinity in x makes its column NaN from its row on, or
    with WHOLE all columns."""
    i = tl.arange(0, 64)
    weights = tl.where(i[:, None] >= i[None, :], T * scale[None, :], 0.0).to(x.dtype)
    y = tl.dot(weights, x, input_precision=precision)
    if not TRUSTED:  # noqa: SIM102 (one is known when compiling)
        if has_bad_number(y):
            bad = is_bad(x)
            spoiled = any_so_far(bad | row_bad[:, None])
            if WHOLE:
                spoiled = (tl.sum(spoiled.to(tl.int32), 1) > 0)[:, None] | (spoiled & False)
            y = tl.dot(zero_where(weights, is_bad(weights)), zero_where(x, bad), input_precision=precision)
            y = tl.where(spoiled, float("nan"), y)
    return y


@triton.jit(do_not_specialize=["time"])
def chunk_cumsum(g, G, chunks, time, HV, PH: tl.constexpr, HEADS_G: tl.constexpr):
    """G [BT, HV] in base 2 from g [BT, HV / HEADS_G], one chunk of all heads."""
    m = tl.program_id(0)
    first, count = chunk_place(chunks, m, time)
    if count == 0:
        return
    i = tl.arange(0, 64)
    head = tl.program_id(1) * PH + tl.arange(0, PH)
    here = (i < count)[:, None] & (head < HV)[None, :]
    token = (first + i)[:, None]
    decay = clamp_decay(tl.load(g + token * (HV // HEADS_G) + (head // HEADS_G)[None, :], here, 0.0))
    tl.store(G + token * HV + head[None, :], tl.cumsum(decay, 0), here)
