"""One decay per key channel: the operands of the state pass and the outputs, and all gradients of a chunk.

With G the log decays summed from the chunk's start, token i keeps exp(G_i - G_j) of token j <= i in a channel. No
product of two factors represents this for every g; two forms together do, in base 2:
- flat, where no channel loses more than 2^-128 in the chunk: 2^(G_i + 64) 2^(-64 - G_j), one product for all pairs
  (in float16, whose exponents end sooner, 2^-14 and 7);
- by halves: a token of a right half and one of the left half before it meet at the border between them,
  2^(G_i - G_border) 2^(G_border - G_j), neither factor above 1; six products, for halves of 32, 16 .. 1 tokens, and i = j apart.
Later tokens never change the value of a pair, only which of the two forms computes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import clamp_decay, is_bad
from ..packing import chunk_place, live_tokens, program_chunk, program_part
from ..tiles import load_gate, load_tile, tile_address
from .gradients import sum_over_values
from .wy import causal_inverse, weigh_rows


@triton.jit
def find_border(half):
    """By halves: for every token [64], the last token of the left half of its pair of halves."""
    i = tl.arange(0, 64)
    return (i & -(2 * half)) + (half - 1)


@triton.jit
def find_pairs(half):
    """By halves: which pairs (i, j) [64, 64] this level computes."""
    i = tl.arange(0, 64)
    return ((i & half) > 0)[:, None] & (((i ^ half) // half)[:, None] == (i // half)[None, :])


@triton.jit(do_not_specialize=["time"])
def wy_transform_channel(
    q, k, write_key, v, beta, g, inverse, Qd, Ke, P, W, U, last_gate, chunks, time, scale, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_G: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_W: tl.constexpr,
    WRITE: tl.constexpr, DELTA: tl.constexpr, REUSE_SAVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: Qd = scale Q exp(G) and Ke = KW exp(G_last - G) [BT, HV, K], P = scale tril(Q exp(G) (KW exp(-G))^T)
    [BT, HV, 64], last_gate = G_last [M, HV, K] and with DELTA T, U, W as in wy.py. REUSE_SAVED: T and U are
    given."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    key_start = (first * H + head // (HV // H)) * K
    write_start = (first * (HV // HEADS_W) + head // HEADS_W) * K
    g_start = (first * (HV // HEADS_G) + head // HEADS_G) * K
    MIDDLE: tl.constexpr = 7.0 if q.dtype.element_ty == tl.float16 else 64.0
    scores = tl.zeros((64, 64), tl.float32)
    A = tl.zeros((64, 64), tl.float32)
    for k0 in range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        here = live[:, None] & (c < K)[None, :]
        at = row[:, None] * K + c[None, :]
        at_key = i[:, None] * (H * K) + c[None, :]
        decay = clamp_decay(tl.load(g + g_start + i[:, None] * (HV // HEADS_G * K) + c[None, :], here, 0.0))
        kept = tl.sum(tl.where(decay == decay, decay, 0.0), 0)  # NaN does not choose the form
        lost = -tl.min(kept, 0)
        G = tl.cumsum(decay, 0)
        total = tl.sum(tl.where(i[:, None] == 63, G, 0.0), 0)
        tl.store(last_gate + (m.to(tl.int64) * HV + head) * K + c, total, c < K)
        if WRITE:
            writes = tl.load(write_key + write_start + i[:, None] * (HV // HEADS_W * K) + c[None, :], here, 0.0)
        else:
            writes = tl.load(k + key_start + at_key, here, 0.0)
        tl.store(Ke + start * K + at, (writes * tl.exp2(total[None, :] - G)).to(Ke.dtype.element_ty), here)
        queries = tl.load(q + key_start + at_key, here, 0.0)
        up = tl.exp2(G + MIDDLE)
        left = queries * (up * scale)
        tl.store(Qd + start * K + at, (left * tl.exp2(-MIDDLE)).to(Qd.dtype.element_ty), here)
        if DELTA:
            keys = tl.load(k + key_start + at_key, here, 0.0)
            left_k = keys * up
            tl.store(W + start * K + at, (left_k * tl.exp2(-MIDDLE)).to(W.dtype.element_ty), here)
        if lost < 2 * MIDDLE:
            right = tl.trans((writes * tl.exp2(-MIDDLE - G)).to(writes.dtype))
            scores = tl.dot(left.to(queries.dtype), right, scores, input_precision=PRECISION)
            if DELTA and not REUSE_SAVED:
                A = tl.dot(left_k.to(queries.dtype), right, A, input_precision=PRECISION)
        else:
            own = tl.sum(queries.to(tl.float32) * writes.to(tl.float32), 1) * scale
            scores += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
            half = 32
            while half > 0:
                at_border = tl.gather(G, tl.broadcast_to(find_border(half)[:, None], G.shape), 0)
                factor, pairs = tl.exp2(-tl.abs(G - at_border)), find_pairs(half)
                right = tl.trans((writes * factor).to(writes.dtype))
                met = tl.dot((queries * (factor * scale)).to(queries.dtype), right, input_precision=PRECISION)
                scores += tl.where(pairs, met, 0.0)
                if DELTA and not REUSE_SAVED:
                    met = tl.dot((keys * factor).to(keys.dtype), right, input_precision=PRECISION)
                    A += tl.where(pairs, met, 0.0)
                half = half // 2
    at_square = start * 64 + row[:, None] * 64 + i[None, :]
    scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
    tl.store(P + at_square, scores.to(P.dtype.element_ty), live[:, None])
    if DELTA:
        gain = load_gate(beta, first, live, head, HV, HEADS_BETA)
        if REUSE_SAVED:
            T = tl.load(inverse + at_square, live[:, None], 0.0).to(tl.float32)
        else:
            A = tl.where((i[:, None] > i[None, :]) & live[:, None], A * gain[:, None], 0.0)
            T = causal_inverse(A, is_bad(gain), PRECISION)
            tl.store(inverse + at_square, T.to(inverse.dtype.element_ty), live[:, None])
        T = tl.where(i[:, None] >= i[None, :], T, 0.0)
        row_bad = is_bad(tl.sum(T, 1))
        if not REUSE_SAVED:
            for v0 in tl.static_range(0, V, BV):
                c = v0 + tl.arange(0, BV)
                at = start * V + row[:, None] * V + c[None, :]
                here = live[:, None] & (c < V)[None, :]
                values = tl.load(v + at, here, 0.0).to(U.dtype.element_ty)
                u = weigh_rows(T, gain, values, row_bad, False, False, PRECISION)
                tl.store(U + at, u.to(U.dtype.element_ty), here)
        tl.debug_barrier()  # W holds K exp(G), as other threads wrote it
        for k0 in tl.static_range(0, K, BK):
            c = k0 + tl.arange(0, BK)
            at = start * K + row[:, None] * K + c[None, :]
            here = live[:, None] & (c < K)[None, :]
            keys = tl.load(W + at, here, 0.0).to(U.dtype.element_ty)
            w = weigh_rows(T, gain, keys, row_bad, REUSE_SAVED, True, PRECISION)
            tl.store(W + at, w.to(W.dtype.element_ty), here)


@triton.jit
def channel_gradients_of_tile(
    part, m, head, first, count, total,
    q, k, write_key, v, beta, g, u, z, do, dP, h, dh, scale, dq, dk, dw, dv, gate_grads, dg, stride, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_G: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_W: tl.constexpr,
    WRITE: tl.constexpr, DELTA: tl.constexpr, FLAT: tl.constexpr, MOST: tl.constexpr, MIDDLE_OF_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`chunk_gradients_channel` of one tile of key channels, in one form. total: G at the chunk's end. MIDDLE_OF_CHUNK: h and dh
    come as `chunk.one_pass.channel` meets states, times exp(R)."""
    i, live = live_tokens(count)
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    c = part * BK + tl.arange(0, BK)
    MIDDLE: tl.constexpr = MOST / 2
    here = live[:, None] & (c < K)[None, :]
    key_start = (first * H + head // (HV // H)) * K
    at_key = i[:, None] * (H * K) + c[None, :]
    gain = load_gate(beta, first, live, head, HV, HEADS_BETA) if DELTA else tl.zeros((64,), tl.float32)
    grad_q, grad_w, grad_k, dA, grad_beta, grad_last = sum_over_values(
        u, z, do, h, dh, v, dv, gain, part, m, head, start, live, c, HV, K, BK, V, BV, DELTA, True, PRECISION
    )
    # The order frees the registers of each sum early.
    at_row = row[:, None] * K + c[None, :]
    at_write = tile_address(write_key, first, head, HV, c, K, HEADS_W) if WRITE else k + key_start + at_key
    writes = tl.load(at_write, here, 0.0)
    G = tl.cumsum(clamp_decay(load_tile(g, first, here, head, HV, c, K, HEADS_G)), 0)
    grad_P = tl.load(dP + start * 64 + row[:, None] * 64 + i[None, :], live[:, None], 0.0)
    grad_A = tl.where(i[:, None] > i[None, :], -dA, 0.0).to(writes.dtype)
    if FLAT:
        down = tl.exp2(-MIDDLE - G)
        right = (writes * down).to(writes.dtype)
        grad_w *= tl.exp2(total + MIDDLE)[None, :]
        grad_last = tl.exp2(total) * grad_last + tl.sum(right * grad_w, 0)
        up = tl.exp2(G + MIDDLE)
        queries = tl.load(q + key_start + at_key, here, 0.0)
        grad_q = tl.dot(grad_P.to(right.dtype), right, grad_q * tl.exp2(-MIDDLE), input_precision=PRECISION)
        left = (queries * (up * scale)).to(queries.dtype)
        grad_G = left * grad_q
        tl.store(dq + start * K + at_row, (grad_q * (up * scale)).to(dq.dtype.element_ty), here)
        grad_w = tl.dot(tl.trans(grad_P.to(left.dtype)), left, grad_w, input_precision=PRECISION)
        if DELTA:
            grad_k = tl.dot(grad_A, right, grad_k * -tl.exp2(-MIDDLE), input_precision=PRECISION)
            keys = tl.load(k + key_start + at_key, here, 0.0)
            left = (keys * (up * gain[:, None])).to(keys.dtype)
            grad_G += left * grad_k
            grad_w = tl.dot(tl.trans(grad_A), left, grad_w, input_precision=PRECISION)
            grad_k *= up
        grad_G -= right * grad_w
        grad_w *= down
    else:
        tl.store(dg + start * K + at_row, G, here)  # read back at the borders, in fewer registers than tl.gather takes
        tl.debug_barrier()
        queries = tl.load(q + key_start + at_key, here, 0.0)
        keys = tl.load(k + key_start + at_key, here, 0.0)
        seen_from = tl.maximum(total, -MOST) / 2 if MIDDLE_OF_CHUNK else tl.zeros((BK,), tl.float32)
        grad_q *= tl.exp2(G - seen_from[None, :]) * scale
        grad_w *= tl.exp2((total - seen_from)[None, :] - G)
        grad_k *= -tl.exp2(G - seen_from[None, :])
        grad_last = tl.exp2(total - 2 * seen_from) * grad_last + tl.sum(writes * grad_w, 0)
        grad_G = queries * grad_q - writes * grad_w
        if DELTA:
            grad_G += keys * (grad_k * gain[:, None])
        border = tl.load(dg + start * K + tl.minimum(31, count - 1) * (HV * K) + c, c < K, 0.0)
        lost = tl.maximum(-border, border - total)
        fits = tl.max(tl.where((border == border) & (total == total), lost, float("inf")), 0) < MOST
        half = 32
        while half > 0:
            last_left = tl.minimum(find_border(half), count - 1)[:, None] * (HV * K) + c[None, :]
            at_border = tl.load(dg + start * K + last_left, (c < K)[None, :], 0.0)
            pairs = find_pairs(half)
            flat = fits & (half == 16)  # all pairs within each half of the chunk
            middle = (border[None, :] + tl.where(i[:, None] < 32, 0.0, total[None, :])) / 2
            at_border = tl.where(flat, middle, at_border)
            pairs = tl.where(flat, (i // 32)[:, None] == (i // 32)[None, :], pairs)
            up, down = tl.exp2(tl.minimum(G - at_border, MIDDLE)), tl.exp2(tl.minimum(at_border - G, MIDDLE))
            right = (writes * down).to(writes.dtype)
            left = (queries * (up * scale)).to(queries.dtype)
            met = tl.where(pairs, grad_P, 0.0).to(left.dtype)
            passed = tl.dot(met, right, input_precision=PRECISION)
            grad_q += passed * (up * scale)
            grad_G += left * passed
            reach = tl.dot(tl.trans(met), left, input_precision=PRECISION)
            if DELTA:
                left = (keys * (up * gain[:, None])).to(keys.dtype)
                met = tl.where(pairs, grad_A, 0.0).to(left.dtype)
                passed = tl.dot(met, right, input_precision=PRECISION)
                grad_k += passed * up
                grad_G += left * passed
                reach = tl.dot(tl.trans(met), left, reach, input_precision=PRECISION)
            grad_w += reach * down
            grad_G -= right * reach
            half = tl.where(flat, 0, half // 2)
        own = tl.sum(tl.where(i[:, None] == i[None, :], grad_P.to(tl.float32), 0.0), 1)
        own = tl.where(fits, 0.0, own * scale)
        tl.store(dq + start * K + at_row, (grad_q + own[:, None] * writes).to(dq.dtype.element_ty), here)
        grad_w += own[:, None] * queries
    grad_G += tl.where((i == count - 1)[:, None], grad_last[None, :], 0.0)
    tl.store(dg + start * K + at_row, tl.cumsum(grad_G, 0, reverse=True), here)
    if DELTA:
        grad_beta += tl.sum(tl.load(k + key_start + at_key, here, 0.0) * grad_k, 1)
        tl.store(gate_grads + part * stride + start + row, grad_beta, live)
        grad_k *= gain[:, None]
    if WRITE:
        tl.store(dk + start * K + at_row, grad_k.to(dk.dtype.element_ty), here)
        tl.store(dw + start * K + at_row, grad_w.to(dw.dtype.element_ty), here)
    elif DELTA:
        tl.store(dk + start * K + at_row, (grad_k + grad_w).to(dk.dtype.element_ty), here)
    else:
        tl.store(dk + start * K + at_row, grad_w.to(dk.dtype.element_ty), here)


@triton.jit(do_not_specialize=["time", "stride"])
def chunk_gradients_channel(
    q, k, write_key, v, beta, g, last_gate, u, z, do, dP, h, dh, chunks, time, scale,
    dq, dk, dw, dv, gate_grads, dg, stride, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_G: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_W: tl.constexpr,
    WRITE: tl.constexpr, DELTA: tl.constexpr, FLAT: tl.constexpr, MOST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `chunk_gradients`, but dP [BT, HV, 64] is tril(dO u^T) and dg is [BT, HV, K]. gate_grads: partial sums of dbeta,
    `stride` from K tile to K tile. Without WRITE dk holds both roles of the key. Two launches share the work: FLAT computes the
    tiles whose form is flat, as no channel loses 2^-MOST, for which it has enough registers, the other the rest. dG is computed
    from the rounded operands of the products, so that a pair on both sides of a token cancels exactly."""
    part, m, head, first, count = program_part(chunks, time, (K + BK - 1) // BK)
    if count == 0:
        return
    c = part * BK + tl.arange(0, BK)
    total = tl.load(last_gate + (m.to(tl.int64) * HV + head) * K + c, c < K, 0.0)
    if (-tl.min(total, 0) < MOST) != FLAT:
        return
    channel_gradients_of_tile(
        part, m, head, first, count, total,
        q, k, write_key, v, beta, g, u, z, do, dP, h, dh, scale, dq, dk, dw, dv, gate_grads, dg, stride, H, HV,
        K, BK, V, BV, HEADS_G, HEADS_BETA, HEADS_W, WRITE, DELTA, FLAT, MOST, False, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["time", "stride", "M"])
def strong_gradients_channel(
    q, k, write_key, v, beta, g, last_gate, u, z, do, dP, h, dh, chunks, time, scale,
    dq, dk, dw, dv, gate_grads, dg, stride, H, HV, M,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_G: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_W: tl.constexpr,
    WRITE: tl.constexpr, DELTA: tl.constexpr, MOST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`chunk_gradients_channel` of all tiles that are not flat among M chunks, where they are few: a program has many tiles, and
    looks at 16 of them at once."""
    PARTS: tl.constexpr = (K + BK - 1) // BK
    LOOK: tl.constexpr = 16
    head, step = tl.program_id(1), tl.num_programs(0)
    for begin in range(tl.program_id(0), PARTS * M, LOOK * step):
        seen = begin + tl.arange(0, LOOK) * step
        channel = (seen % PARTS)[:, None] * BK + tl.arange(0, BK)[None, :]
        at_total = ((seen // PARTS).to(tl.int64)[:, None] * HV + head) * K + channel
        totals = tl.load(last_gate + at_total, (seen < PARTS * M)[:, None] & (channel < K), 0.0)
        strong = tl.sum((-tl.min(totals, 1) >= MOST).to(tl.int32), 0) > 0
        if strong:
            for number in range(begin, tl.minimum(begin + LOOK * step, PARTS * M), step):
                part, m = number % PARTS, number // PARTS
                first, count = chunk_place(chunks, m, time)
                c = part * BK + tl.arange(0, BK)
                total = tl.load(last_gate + (m.to(tl.int64) * HV + head) * K + c, (c < K) & (count > 0), 0.0)
                if -tl.min(total, 0) >= MOST:
                    channel_gradients_of_tile(
                        part, m, head, first, count, total,
                        q, k, write_key, v, beta, g, u, z, do, dP, h, dh, scale, dq, dk, dw, dv, gate_grads, dg, stride, H, HV,
                        K, BK, V, BV, HEADS_G, HEADS_BETA, HEADS_W, WRITE, DELTA, False, MOST, True, PRECISION,
                    )  # fmt: skip
