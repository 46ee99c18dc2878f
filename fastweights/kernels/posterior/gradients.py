"""Gradients of the posterior's read-out and of what was written, backwards through a segment."""

from __future__ import annotations

import triton
import triton.language as tl

from ..packing import segment_place
from .tile import add_to, load_rows, load_tile, load_token, spread, store_tile, write


@triton.jit
def place_in_scratch(slot, P: tl.constexpr, PARTS: tl.constexpr, BV: tl.constexpr):
    return slot * (P * PARTS * BV) + tl.arange(0, P)[:, None] * BV + tl.arange(0, BV)[None, :]


@triton.jit
def put(scratch, slot, tile, P: tl.constexpr, PARTS: tl.constexpr, BV: tl.constexpr):
    for part in tl.static_range(PARTS):
        at = scratch + place_in_scratch(slot, P, PARTS, BV) + part * (P * BV)
        tl.store(at, tile[part].to(scratch.dtype.element_ty))


@triton.jit
def get(scratch, slot, P: tl.constexpr, PARTS: tl.constexpr, BV: tl.constexpr):
    tile = ()
    for part in tl.static_range(PARTS):
        at = scratch + place_in_scratch(slot, P, PARTS, BV) + part * (P * BV)
        tile = tile + (tl.load(at).to(tl.float32),)
    return tile


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def inner_product(A, B, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        if part == 0:
            x = A[part] * B[part]
        else:
            x += A[part] * B[part]
    return tl.sum(x)


@triton.jit
def times(tile, x, PARTS: tl.constexpr):
    out = ()
    for part in tl.static_range(PARTS):
        out = out + (x * tile[part],)
    return out


@triton.jit
def differentiate(
    M, J, dM, dJ, a_next, key, query, value, gain, grad_o, grad_w, p,
    PARTS: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One token, from its states M, J and the gradients of the next token's states: the gradients of its states, of its q and k
    by parts, of v and beta [BV], the sum of W, and <dw, variance>."""
    new_dM, new_dJ, of_keys = (), (), ()
    of_variance = 0.0
    for part in tl.static_range(PARTS):
        k, q = key[part], query[part]
        r = spread(J[part], p, PRECISION)
        by_o = grad_o[None, :] * r
        P_t = q[:, None] * by_o
        W_t = P_t * (M[part] * r)
        if VARIANCE:
            by_w = grad_w[None, :] * r
            W_t += (q * q)[:, None] * by_w * r
        dM_t = a_next * dM[part] + P_t
        dJ_t = a_next * dJ[part] - W_t
        to_q, to_k, to_squares = tl.reduce((M[part] * by_o, dM_t * value[None, :], dJ_t * gain[None, :]), 1, add3)
        if VARIANCE:
            y = tl.sum(by_w, 1)
            to_q += 2 * q * y
            of_variance += tl.sum(q * q * y)
        of_keys = of_keys + ((to_q, to_k + 2 * k * to_squares),)
        if part == 0:
            to_v, to_beta, all_W = dM_t * k[:, None], dJ_t * (k * k)[:, None], W_t
        else:
            to_v += dM_t * k[:, None]
            to_beta += dJ_t * (k * k)[:, None]
            all_W += W_t
        new_dM, new_dJ = new_dM + (dM_t,), new_dJ + (dJ_t,)
    value_grad, gain_grad, W_sum = tl.reduce((to_v, to_beta, all_W), 0, add3)
    return new_dM, new_dJ, of_keys, value_grad, gain_grad, tl.sum(W_sum), of_variance


@triton.jit(do_not_specialize=["time", "tokens"])
def posterior_gradients(
    q, k, v, beta, g, prior, M_chunk, J_chunk, do, dw, dM_end, dJ_end, scratch_M, scratch_J,
    dq, dk, dv, dbeta, dg, dprior, dM_start, dJ_start, segments, time, tokens, scale, HV,
    K: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STEP: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
    GIVEN_M: tl.constexpr, GIVEN_J: tl.constexpr, ENDED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    V_TILES: tl.constexpr = (V + BV - 1) // BV
    K_TILES: tl.constexpr = (K + P * PARTS - 1) // (P * PARTS)
    SLOTS: tl.constexpr = 64 // STEP + 1
    tile, segment, head = (
        tl.program_id(0) % (V_TILES * K_TILES),
        tl.program_id(0) // (V_TILES * K_TILES),
        tl.program_id(1),
    )
    v_tile, k_tile = (tile % V_TILES).to(tl.int64), (tile // V_TILES).to(tl.int64)
    first, stop, first_chunk, sequence, is_first, _ = segment_place(segments, segment, time)
    column = (tile % V_TILES) * BV + tl.arange(0, BV)
    first_key = (tile // V_TILES) * (P * PARTS)
    p = tl.load(prior + head)
    held = p if PRECISION == "tf32" else 0.0
    program = (segment.to(tl.int64) * (V_TILES * K_TILES) + tile) * HV + head
    scratch_M += program * (SLOTS * P * PARTS * BV)
    scratch_J += program * (SLOTS * P * PARTS * BV)
    state = segment.to(tl.int64) * HV + head
    dM = load_tile(dM_end, state, first_key, column, GIVEN_M & (time > 0), K, V, P, PARTS)
    dJ = load_tile(dJ_end, state, first_key, column, GIVEN_J & (time > 0), K, V, P, PARTS)
    a_next = 1.0
    total = 0.0
    for c in range((stop - first + 63) // 64 - 1, -1, -1):
        begin = first + c * 64
        chunk = (first_chunk + c) * HV + head
        count = tl.minimum(stop - begin, 64).to(tl.int32)
        M = load_tile(M_chunk, chunk, first_key, column, True, K, V, P, PARTS)
        J = add_to(load_tile(J_chunk, chunk, first_key, column, True, K, V, P, PARTS), held, PARTS)
        put(scratch_M, 0, M, P, PARTS, BV)
        put(scratch_J, 0, J, P, PARTS, BV)
        subs = (count + STEP - 1) // STEP
        for sub in range(0, subs):
            for j in tl.static_range(STEP):
                i = sub * STEP + j
                key, value, gain, a = load_token(
                    k, v, beta, g, begin + i, i < count, column, first_key, head, HV, K, P, PARTS, V, HEADS_K, HEADS_BETA,
                    HEADS_G,
                )  # fmt: skip
                M, J = write(M, J, key, value, gain, a, held - a * held, PARTS)
            put(scratch_M, sub + 1, M, P, PARTS, BV)
            put(scratch_J, sub + 1, J, P, PARTS, BV)
        # The gradient of the decay that follows the chunk; those inside come from it by differences.
        later = a_next * (inner_product(dM, M, PARTS) + inner_product(dJ, add_to(J, -held, PARTS), PARTS))
        for back in range(0, subs):
            sub = subs - 1 - back
            for step in tl.static_range(STEP):
                if step == 0:
                    M = get(scratch_M, sub + 1, P, PARTS, BV)
                    J = get(scratch_J, sub + 1, P, PARTS, BV)
                else:
                    M = get(scratch_M, sub, P, PARTS, BV)
                    J = get(scratch_J, sub, P, PARTS, BV)
                    for j in tl.static_range(STEP - step):
                        i = sub * STEP + j
                        key, value, gain, a = load_token(
                            k, v, beta, g, begin + i, i < count, column, first_key, head, HV, K, P, PARTS, V, HEADS_K,
                            HEADS_BETA, HEADS_G,
                        )  # fmt: skip
                        M, J = write(M, J, key, value, gain, a, held - a * held, PARTS)
                i = sub * STEP + (STEP - 1 - step)
                t, here = begin + i, i < count
                key, value, gain, a = load_token(
                    k, v, beta, g, t, here, column, first_key, head, HV, K, P, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G
                )
                live = (column < V) & here
                query = load_rows(
                    q, (t * (HV // HEADS_K) + head // HEADS_K) * K, first_key, tl.where(here, K, 0), P, PARTS
                )
                grad_o = tl.load(do + (t * HV + head) * V + column, live, 0.0).to(tl.float32) * scale
                grad_w = grad_o
                if VARIANCE:
                    grad_w = tl.load(dw + (t * HV + head) * V + column, live, 0.0).to(tl.float32) * (scale * scale)
                dM, dJ, of_keys, value_grad, gain_grad, read, of_variance = differentiate(
                    M, J, dM, dJ, a_next, key, query, value, gain, grad_o, grad_w, p, PARTS, VARIANCE, PRECISION
                )
                a_next = a
                for part in tl.static_range(PARTS):
                    channel = first_key + part * P + tl.arange(0, P)
                    at = ((v_tile * tokens + t) * HV + head) * K + channel
                    to_q, to_k = of_keys[part]
                    tl.store(dq + at, to_q.to(dq.dtype.element_ty), (channel < K) & here)
                    tl.store(dk + at, to_k.to(dk.dtype.element_ty), (channel < K) & here)
                at = ((k_tile * tokens + t) * HV + head) * V + column
                tl.store(dv + at, value_grad.to(dv.dtype.element_ty), live)
                tl.store(dbeta + at, gain_grad.to(dbeta.dtype.element_ty), live)
                total += read
                later += p * read - of_variance - tl.sum(value * value_grad + gain * gain_grad)
                tl.store(dg + (tile.to(tl.int64) * tokens + t) * HV + head, later, here)
    tl.store(dprior + program, -total)
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if is_first:
            at_start = sequence.to(tl.int64) * HV + head
            store_tile(dM_start, at_start, first_key, column, times(dM, a_next, PARTS), K, V, P, PARTS)
            store_tile(dJ_start, at_start, first_key, column, times(dJ, a_next, PARTS), K, V, P, PARTS)


@triton.jit(do_not_specialize=["count", "parts"])
def sum_tiles(x, out, count, parts, BLOCK: tl.constexpr):
    """out [count] from x [parts, count]: what the tiles of a head left of a gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(parts):
        total += tl.load(x + at, at < count, 0.0).to(tl.float32)
        x += count
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)
