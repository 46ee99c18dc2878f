"""Outputs of all chunks in parallel once their states are known, and backwards the gradients of the values.

O  = Q_decayed S + P u              P = scale tril(Q exp(G) (KW exp(-G))^T)
du' = P^T dO                        (linear attention adds KW_decayed dS: all of dV)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import any_so_far, has_bad_number, infinite_to_nan, is_bad, zero_where
from ..packing import live_tokens, program_chunk, program_part
from ..tiles import load_state, load_tile


@triton.jit
def rounding_error(x, rounded):
    """What x, in float32, lacks in 16 bits, in 16 bits as well."""
    return (x - rounded.to(tl.float32)).to(rounded.dtype)


@triton.jit(do_not_specialize=["time"])
def chunk_output(
    q, k, u, gate, P, states, o, q_rest, divisor, chunks, time, scale, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr,
    DECAY: tl.constexpr, FINER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With DECAY 2 q comes decayed and scaled and P [BT, HV, 64] is given. q_rest: what q lacks, where queries are sums of two
    tensors; divisor [BT, HV] of the outputs, or None. FINER: P as the sum of two numbers of 16 bits."""
    part, m, head, first, count = program_part(chunks, time, (V + BV - 1) // BV)
    if count == 0:
        return
    i, live = live_tokens(count)
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    state = (m.to(tl.int64) * HV + head) * K * V
    column = part * BV + tl.arange(0, BV)
    narrow = live[:, None] & (column < V)[None, :]
    lower = i[:, None] >= i[None, :]
    out = tl.zeros((64, BV), tl.float32)
    inner = tl.zeros((64, 64), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        c = k0 + tl.arange(0, BK)
        here = live[:, None] & (c < K)[None, :]
        queries = load_tile(q, first, here, head, HV, c, K, HEADS_Q)
        S = load_state(states + state, c, column, K, V)
        out = tl.dot(queries, S, out, input_precision=PRECISION)
        if DECAY != 2:
            keys = load_tile(k, first, here, head, HV, c, K, HEADS_K)
            inner = tl.dot(queries, tl.trans(keys), inner, input_precision=PRECISION)
            if q_rest is not None:
                rest = load_tile(q_rest, first, here, head, HV, c, K, HEADS_Q)
                out = tl.dot(rest, S, out, input_precision=PRECISION)
                inner = tl.dot(rest, tl.trans(keys), inner, input_precision=PRECISION)
    if DECAY == 2:
        inner = tl.load(P + start * 64 + row[:, None] * 64 + i[None, :], live[:, None], 0.0).to(tl.float32)
    elif DECAY == 1:
        decay = tl.load(gate + start + tl.minimum(i, count - 1) * HV)  # past the end the last decay: no overflow
        out *= tl.exp2(decay)[:, None] * scale
        inner *= tl.exp2(tl.where(lower, decay[:, None] - decay[None, :], 0.0)) * scale
    else:
        out *= scale
        inner *= scale
    value_type = o.dtype.element_ty
    values = tl.load(u + start * V + row[:, None] * V + column[None, :], narrow, 0.0).to(value_type)
    scores = tl.where(lower, inner, 0.0)
    inner = scores.to(value_type)
    result = out + tl.dot(inner, values, input_precision=PRECISION)
    if FINER:
        rest = rounding_error(scores, inner)
        result = tl.dot(rest, values, result, input_precision=PRECISION)
    if has_bad_number(result):  # a bad token spoils itself and what follows
        values = tl.load(u + start * V + row[:, None] * V + column[None, :], narrow, 0.0).to(value_type)
        bad = is_bad(values)  # a bad row of `inner` stays one: 0 times NaN
        result = out + tl.dot(inner, zero_where(values, bad), input_precision=PRECISION)
        if FINER:
            result = tl.dot(rest, zero_where(values, bad), result, input_precision=PRECISION)
        result = infinite_to_nan(tl.where(any_so_far(bad), float("nan"), result))
    if divisor is not None:
        result /= tl.load(divisor + start + row, live, 1.0)[:, None]
    tl.store(o + start * V + row[:, None] * V + column[None, :], result.to(o.dtype.element_ty), narrow)


@triton.jit(do_not_specialize=["time"])
def value_grads(
    q, k, u, do, gate, P, states, dv, dP, q_rest, divisor, chunks, time, scale, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr,
    DECAY: tl.constexpr, STATES: tl.constexpr, FINER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv = P^T dO, and with STATES (the gradients of the states at the chunks' ends) all of dV; dP [BT, HV, 64] = tril(dO u^T)
    times the factors of P = Q KW^T. With DECAY 2 k comes decayed, P is given, and dP is tril(dO u^T) alone. divisor [BT, HV] of
    the outputs, or None: the rows of P and dP are divided, as dO is exact. FINER: P as the sum of two numbers of 16 bits."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    start = first * HV + head  # scalars in front, so that the offsets of a tile are small numbers
    row = i * HV
    state = (m.to(tl.int64) * HV + head) * K * V
    lower = i[:, None] >= i[None, :]
    if DECAY == 2:
        inner = tl.load(P + start * 64 + row[:, None] * 64 + i[None, :], live[:, None], 0.0).to(tl.float32)
    else:
        inner = tl.zeros((64, 64), tl.float32)
        for k0 in tl.static_range(0, K, BK):
            c = k0 + tl.arange(0, BK)
            here = live[:, None] & (c < K)[None, :]
            keys = load_tile(k, first, here, head, HV, c, K, HEADS_K)
            queries = load_tile(q, first, here, head, HV, c, K, HEADS_Q)
            inner = tl.dot(queries, tl.trans(keys), inner, input_precision=PRECISION)
            if q_rest is not None:
                rest = load_tile(q_rest, first, here, head, HV, c, K, HEADS_Q)
                inner = tl.dot(rest, tl.trans(keys), inner, input_precision=PRECISION)
    if DECAY == 1:
        decay = tl.load(gate + start + tl.minimum(i, count - 1) * HV)  # past the end the last decay: no overflow
        pair = tl.exp2(tl.where(lower, decay[:, None] - decay[None, :], 0.0)) * scale
        inner *= pair
    elif DECAY == 0:
        inner *= scale
    inner = tl.where(lower, inner, 0.0)
    if divisor is not None:
        by = tl.load(divisor + start + row, live, 1.0)
        inner /= by[:, None]
    rounded = inner.to(do.dtype.element_ty)
    weights = tl.trans(rounded)
    if FINER:
        rest = tl.trans(rounding_error(inner, rounded))
    grad_P = tl.zeros((64, 64), tl.float32)
    for v0 in tl.static_range(0, V, BV):
        column = v0 + tl.arange(0, BV)
        at = row[:, None] * V + column[None, :]
        narrow = live[:, None] & (column < V)[None, :]
        grad_o = tl.load(do + start * V + at, narrow, 0.0)
        out = tl.dot(weights, grad_o, input_precision=PRECISION)
        if FINER:
            out = tl.dot(rest, grad_o, out, input_precision=PRECISION)
        if STATES:
            across = tl.zeros((64, BV), tl.float32)
            for k0 in tl.static_range(0, K, BK):
                c = k0 + tl.arange(0, BK)
                keys = load_tile(k, first, live[:, None] & (c < K)[None, :], head, HV, c, K, HEADS_K)
                dS = load_state(states + state, c, column, K, V)
                across = tl.dot(keys, dS, across, input_precision=PRECISION)
            if DECAY == 1:
                across *= tl.exp2(tl.load(gate + (first + count - 1) * HV + head) - decay)[:, None]
            out += across
        tl.store(dv + start * V + at, out.to(dv.dtype.element_ty), narrow)
        written = tl.load(u + start * V + at, narrow, 0.0).to(grad_o.dtype)  # after the store, which frees registers
        grad_P = tl.dot(grad_o, tl.trans(written), grad_P, input_precision=PRECISION)
    if DECAY == 1:
        grad_P *= pair
    elif DECAY == 0:
        grad_P *= scale
    if divisor is not None:
        grad_P /= by[:, None]
    grad_P = tl.where(lower, grad_P, 0.0).to(dP.dtype.element_ty)
    tl.store(dP + start * 64 + row[:, None] * 64 + i[None, :], grad_P, live[:, None])
