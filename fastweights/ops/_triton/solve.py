"""The delta rule's part inside a chunk: what the tokens of a chunk write, given the state S at its start, is U - W S.

    A = tril(diag(beta) (K exp(G)) (KW exp(-G))^T, -1),  T = (I + A)^-1,  U = T diag(beta) V,  W = T diag(beta) K exp(G)

T is found by forward substitution over blocks of 16 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import clamped, is_bad, so_far, spoiled_somewhere, without


@triton.jit
def unit_lower_inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular [64, 64]: the diagonal blocks of 16, then row after row of blocks by
    T_i = X_i (E_i - sum_{j < i} A_ij T_j). (Products of 16 rows, which Triton 3.6 gives to mma: with a float32 wgmma of 64 x 64
    in their place, solves of some sizes read outside their shared memory on an H200.)"""
    token = tl.arange(0, 64)
    block = tl.arange(0, 4)
    own = (token // 16)[:, None] == block[None, :]
    X = inverse_of_blocks(
        tl.reshape(tl.sum(tl.where(own[:, :, None], tl.reshape(A, (64, 4, 16)), 0.0), 1), (4, 16, 16))
    )
    T = tl.reshape(tl.where(own[:, :, None], tl.reshape(X, (64, 1, 16)), 0.0), (4, 16, 64))
    off = tl.where((token // 16)[:, None] == (token // 16)[None, :], 0.0, A)
    rows = tl.reshape(off, (4, 16, 64))
    for i in tl.static_range(1, 4):
        here = (block == i)[:, None, None]
        before = tl.dot(tl.sum(tl.where(here, rows, 0.0), 0), tl.reshape(T, (64, 64)), input_precision=PRECISION)
        step = tl.dot(tl.sum(tl.where(here, X, 0.0), 0), before, input_precision=PRECISION)
        T = tl.where(here, T - step[None, :, :], T)
    return tl.reshape(T, (64, 64))


@triton.jit
def inverse_of_blocks(D):
    """(I + D)^-1 of four strictly lower triangular [16, 16]: blocks of 8 as (I - E)(I + E^2)(I + E^4), which grow little even
    where all keys are one, then two of them joined. In full float32."""
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
    """(I + A)^-1 where a bad number in A, or a `bad` row, spoils its row and what follows, not what came before."""
    spoiled = so_far(is_bad(tl.sum(A, 1)) | bad)[:, None]
    return tl.where(spoiled, float("nan"), unit_lower_inverse(tl.where(spoiled, 0.0, A), PRECISION))


@triton.jit
def solve(
    k, write_key, v, beta, g, inverse, W, U, G, chunks,
    H, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HEADS_G: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_W: tl.constexpr,
    WRITE: tl.constexpr, DECAY: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. Heads of gates and write keys are given as HV // heads. KNOWN: T is read, not found."""
    m, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 2 * m).to(tl.int64)
    count = tl.load(chunks + 2 * m + 1)
    i = tl.arange(0, 64)
    live = i < count
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    at_keys = k + (first * H + head // (HV // H)) * K + i[:, None] * (H * K)
    gain = tl.load(beta + first * (HV // HEADS_BETA) + head // HEADS_BETA + i * (HV // HEADS_BETA), live, 0.0).to(
        tl.float32
    )
    if DECAY:
        if KNOWN:
            decay = tl.load(G + start + row, live, 0.0)
        else:
            step = tl.load(g + first * (HV // HEADS_G) + head // HEADS_G + i * (HV // HEADS_G), live, 0.0)
            decay = tl.cumsum(clamped(step), 0)
            tl.store(G + start + row, decay, live)
    at_T = inverse + start * 64 + row[:, None] * 64 + i[None, :]
    if KNOWN:
        T = tl.load(at_T, live[:, None], 0.0)
    else:
        A = tl.zeros((64, 64), tl.float32)
        for k0 in tl.static_range(0, K, BK):
            c = k0 + tl.arange(0, BK)
            here = live[:, None] & (c < K)[None, :]
            keys = tl.load(at_keys + c[None, :], here, 0.0)
            if WRITE:
                at_write = (
                    write_key + (first * (HV // HEADS_W) + head // HEADS_W) * K + i[:, None] * (HV // HEADS_W * K)
                )
                A = tl.dot(keys, tl.trans(tl.load(at_write + c[None, :], here, 0.0)), A, input_precision=PRECISION)
            else:
                A = tl.dot(keys, tl.trans(keys), A, input_precision=PRECISION)
        A *= gain[:, None]
        if DECAY:
            A *= tl.exp2(tl.where(i[:, None] > i[None, :], decay[:, None] - decay[None, :], 0.0))
        A = tl.where((i[:, None] > i[None, :]) & live[:, None], A, 0.0)
        T = causal_inverse(A, is_bad(gain), PRECISION)
        T = T.to(inverse.dtype.element_ty)
        tl.store(at_T, T, live[:, None])

    T = tl.where(i[:, None] >= i[None, :], T.to(tl.float32), 0.0)
    row_bad = is_bad(tl.sum(T, 1))
    scale = gain
    for v0 in tl.static_range(0, V, BV):
        c = v0 + tl.arange(0, BV)
        at = row[:, None] * V + c[None, :]
        here = live[:, None] & (c < V)[None, :]
        u = weighted(T, scale, tl.load(v + start * V + at, here, 0.0), row_bad, KNOWN, False, PRECISION)
        tl.store(U + start * V + at, u.to(U.dtype.element_ty), here)
    if DECAY:
        scale = gain * tl.exp2(decay)
    for k0 in tl.static_range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        here = live[:, None] & (c < K)[None, :]
        keys = tl.load(at_keys + c[None, :], here, 0.0)
        w = weighted(T, scale, keys, row_bad, KNOWN, True, PRECISION)
        tl.store(W + start * K + row[:, None] * K + c[None, :], w.to(W.dtype.element_ty), here)


@triton.jit
def weighted(T, scale, x, row_bad, TRUSTED: tl.constexpr, WHOLE: tl.constexpr, precision: tl.constexpr):
    """T diag(scale) x for a lower triangular T. Unless TRUSTED a bad number in x spoils its column, or with WHOLE all of them,
    from its row on and not before."""
    i = tl.arange(0, 64)
    weights = tl.where(i[:, None] >= i[None, :], T * scale[None, :], 0.0).to(x.dtype)
    y = tl.dot(weights, x, input_precision=precision)
    if not TRUSTED:  # noqa: SIM102 (one is known when compiling)
        if spoiled_somewhere(y):
            bad = is_bad(x)
            spoiled = so_far(bad | row_bad[:, None])
            if WHOLE:
                spoiled = (tl.sum(spoiled.to(tl.int32), 1) > 0)[:, None] | (spoiled & False)
            y = tl.dot(without(weights, is_bad(weights)), without(x, bad), input_precision=precision)
            y = tl.where(spoiled, float("nan"), y)
    return y
