"""All gradients of one chunk from its states, without decay or with one per head.

With h the state at the chunk's start, dS its gradient at the end, P the scores, u what was written, z = T^T du:
    dP = tril(dO u^T)             dQ = exp(G) dO h^T + dP KW          dKW = exp(G_last - G) u dS^T + dP^T Q + dA^T K
    dA = -tril(z u^T, -1)         dK = beta (dA KW - exp(G) z h^T)    dV = beta z
    dG = <q, dq> - <kw, dkw> + <k, dk>, and what the decay of the whole chunk does to the state at its last token
where dP and dA carry the decay of their pair, and beta where it stands in P and A.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..packing import live_tokens, program_part
from ..tiles import load_gate, tile_address


@triton.jit
def sum_over_values(
    u, z, do, h, dh, v, dv, gain, part, m, head, start, live, c, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over value columns, before any decay: dO h^T, u dS^T, z h^T, z u^T, <z, v> and with DECAY <h, dS> per
    channel. The first tile of channels writes dV, unless there are no v.

    No tensor of the loop is an operand of a product and used in registers as well: what registers need is loaded again, with
    another eviction policy so that Triton does not merge the loads. For a load with both uses Triton's pipeliner (3.6)
    reserves one buffer too few on Hopper, and the copy of a later step overwrites an operand that a product still reads.
    """
    row = tl.arange(0, 64) * HV
    state = (m.to(tl.int64) * HV + head) * K * V
    grad_q = tl.zeros((64, BK), tl.float32)
    grad_w = tl.zeros((64, BK), tl.float32)
    grad_k = tl.zeros((64, BK), tl.float32)
    dA = tl.zeros((64, 64), tl.float32)
    grad_beta = tl.zeros((64,), tl.float32)
    overlap_sums = tl.zeros((BK,), tl.float32)
    for v0 in range(0, V, BV):
        column = v0 + tl.arange(0, BV)
        at = row[:, None] * V + column[None, :]
        narrow = live[:, None] & (column < V)[None, :]
        at_state = c[:, None] * V + column[None, :]
        inside = (c < K)[:, None] & (column < V)[None, :]
        grad_o = tl.load(do + start * V + at, narrow, 0.0)
        written = tl.load(u + start * V + at, narrow, 0.0).to(grad_o.dtype)
        S = tl.load(h + state + at_state, inside, 0.0)
        dS = tl.load(dh + state + at_state, inside, 0.0)
        if DECAY:
            S_again = tl.load(h + state + at_state, inside, 0.0, eviction_policy="evict_last")
            dS_again = tl.load(dh + state + at_state, inside, 0.0, eviction_policy="evict_last")
            overlap_sums += tl.sum(S_again.to(tl.float32) * dS_again.to(tl.float32), 1)
        grad_q = tl.dot(grad_o, tl.trans(S), grad_q, input_precision=PRECISION)
        grad_w = tl.dot(written, tl.trans(dS), grad_w, input_precision=PRECISION)
        if DELTA:
            corrected = tl.load(z + start * V + at, narrow, 0.0).to(grad_o.dtype)
            if part == 0 and v is not None:
                full = tl.load(z + start * V + at, narrow, 0.0, eviction_policy="evict_last").to(tl.float32)
                grad_beta += tl.sum(full * tl.load(v + start * V + at, narrow, 0.0).to(tl.float32), 1)
                tl.store(dv + start * V + at, (gain[:, None] * full).to(dv.dtype.element_ty), narrow)
            dA = tl.dot(corrected, tl.trans(written), dA, input_precision=PRECISION)
            grad_k = tl.dot(corrected, tl.trans(S), grad_k, input_precision=PRECISION)
    return grad_q, grad_w, grad_k, dA, grad_beta, overlap_sums


@triton.jit(do_not_specialize=["time", "stride"])
def chunk_gradients(
    q, k, write_key, v, beta, gate, u, z, do, dP, h, dh, chunks, time, scale,
    dq, dk, dw, dv, gate_grads, q_rest, divisor, stride, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_BETA: tl.constexpr, HEADS_W: tl.constexpr,
    WRITE: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """gate_grads: partial sums of dbeta and dg [K tiles, 2, BT, HV], `stride` from tile to tile. Without WRITE dk holds both
    roles of the key. Where beta, v, dv and gate_grads are None, z is the gradient of the memory's answers, negated. Without
    PAIRS, which DELTA needs, dw and dg lack what dP gives to them. divisor [BT, HV] of the outputs, or None; dP comes divided."""
    part, m, head, first, count = program_part(chunks, time, (K + BK - 1) // BK)
    if count == 0:
        return
    i, live = live_tokens(count)
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    c = part * BK + tl.arange(0, BK)
    here = live[:, None] & (c < K)[None, :]
    at_key = i[:, None] * (H * K) + c[None, :]
    key_start = (first * H + head // (HV // H)) * K
    key_type = q.dtype.element_ty
    if beta is None:  # noqa: SIM108 (one is known when compiling)
        gain = tl.full((64,), 1.0, tl.float32)
    else:
        gain = load_gate(beta, first, live, head, HV, HEADS_BETA)
    grad_q, grad_w, grad_k, dA, grad_beta, overlap_sums = sum_over_values(
        u, z, do, h, dh, v, dv, gain, part, m, head, start, live, c, HV, K, BK, V, BV, DELTA, DECAY > 0, PRECISION
    )
    # The order frees the registers of each sum early.
    at_row = row[:, None] * K + c[None, :]
    at_write = tile_address(write_key, first, head, HV, c, K, HEADS_W) if WRITE else k + key_start + at_key
    grad_P = tl.load(dP + start * 64 + row[:, None] * 64 + i[None, :], live[:, None], 0.0)
    writes = tl.load(at_write, here, 0.0)
    if DECAY:
        decay = tl.load(gate + start + tl.minimum(i, count - 1) * HV)  # past the end the last decay: no overflow
        total = tl.load(gate + (first + count - 1) * HV + head)
        grad_q *= tl.exp2(decay)[:, None]
        grad_w *= tl.exp2(total - decay)[:, None]
        grad_last = tl.exp2(total) * tl.sum(overlap_sums, 0) + tl.sum(writes.to(tl.float32) * grad_w)
    grad_q *= scale
    if divisor is not None:
        grad_q /= tl.load(divisor + start + row, live, 1.0)[:, None]
    if PAIRS:
        grad_q = tl.dot(grad_P, writes, grad_q, input_precision=PRECISION)
    queries = tl.load(q + key_start + at_key, here, 0.0)
    if PAIRS:
        tl.store(dq + start * K + at_row, grad_q.to(dq.dtype.element_ty), here)
    summed = tl.sum(queries.to(tl.float32) * grad_q, 1)
    if q_rest is not None:
        rest = tl.load(q_rest + key_start + at_key, here, 0.0)
        summed += tl.sum(rest.to(tl.float32) * grad_q, 1)
    if PAIRS:
        grad_w = tl.dot(tl.trans(grad_P), queries, grad_w, input_precision=PRECISION)
    else:
        grad_q = tl.dot(grad_P, writes, grad_q, input_precision=PRECISION)
        tl.store(dq + start * K + at_row, grad_q.to(dq.dtype.element_ty), here)
    if DELTA:
        pair = i[:, None] > i[None, :]
        if DECAY:
            dA *= tl.exp2(tl.where(pair, decay[:, None] - decay[None, :], 0.0))
            grad_k *= tl.exp2(decay)[:, None]
        dA = tl.where(pair, -dA, 0.0)
        keys = tl.load(k + key_start + at_key, here, 0.0)
        grad_k = tl.dot(dA.to(key_type), writes, -grad_k, input_precision=PRECISION)
        overlap = tl.sum(keys.to(tl.float32) * grad_k, 1)
        if beta is not None:
            tl.store(gate_grads + part * stride + start + row, grad_beta + overlap, live)
        summed += overlap * gain
        grad_k *= gain[:, None]
        if WRITE:
            tl.store(dk + start * K + at_row, grad_k.to(dk.dtype.element_ty), here)
        grad_w = tl.dot(tl.trans((dA * gain[:, None]).to(key_type)), keys, grad_w, input_precision=PRECISION)
    if DECAY:
        summed -= tl.sum(tl.load(at_write, here, 0.0).to(tl.float32) * grad_w, 1)
        summed = tl.where(i == count - 1, summed + grad_last, summed)
        summed = tl.cumsum(tl.where(live, summed, 0.0), 0, reverse=True)
        tl.store(gate_grads + part * stride + stride // 2 + start + row, summed, live)
    if WRITE:
        tl.store(dw + start * K + at_row, grad_w.to(dw.dtype.element_ty), here)
    else:
        tl.store(dk + start * K + at_row, (grad_k + grad_w).to(dk.dtype.element_ty), here)
