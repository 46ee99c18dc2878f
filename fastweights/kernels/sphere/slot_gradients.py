"""The backward of the steps of slots, chunk by chunk: see slot_steps.py, and __init__.py for the gradients of one token.

With A = L s and D = L h of a token (L: the gradient in a slot after it, s: the slot before it) the gradient of b is linear in
both, x = of_A A + of_D D, and L <- f L + x h. Inside a chunk L is followed by its products with what lies before: y_c = L h_c and
z = L s_0. Then D = y_t, and A follows from s_{t-1} = f_{t-1} (.. (f_1 s_0 + w_1 h_1) ..) + w_{t-1} h_{t-1}. At the start of a
chunk the part of L along the slot, z, is taken out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import float_or_nan
from .forward import EVERY, LEAST_DECAY, TILE, edges, not_below
from .slot_outputs import across_borders, from_border, load_steps, until_border
from .slot_steps import (
    block_place,
    fetch_of_slots,
    fetch_rows,
    fetch_steps,
    inverse_root,
    is_there,
    of_slots,
    of_steps,
    of_tokens,
    product,
    row,
    rows_of,
    step_places,
)


@triton.jit
def step_again(
    k, gamma, decay, first_per_square, along, F, W, square, place, in_head, count, head, n, is_first, token, slot,
    HV: tl.constexpr, K: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    HEADS_DECAY: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Of the steps of a chunk [16, TILE]: b, the error c, 1 / n^2, gamma / n^2, decay, 1 / m, |h|^2 - b^2 times w / m, and what
    the gradient of b takes of A and of D."""
    key = float_or_nan(of_slots(k, place, token, slot, count, HV, K, HEADS_K))
    gain = float_or_nan(of_tokens(gamma, place, token, count, HV, HEADS_GAMMA, 0.0))
    d = gain * 0 + 1
    if decay is not None:
        d = not_below(float_or_nan(of_tokens(decay, place, token, count, HV, HEADS_DECAY, 1.0)), LEAST_DECAY)
    b = of_steps(along, in_head, token, slot, K, 0.0)
    per_square = tl.load(first_per_square + (n * HV + head) * K + slot, slot < K, 0.0)
    per_square = tl.where((token == 0) & is_first, per_square, tl.where(per_square > 0, 1.0, 0.0))
    gain *= per_square
    error = key - b if OBJECTIVE == "encode" else key
    a = gain * error
    across = not_below(square - b * b, 0.0)
    inverse = inverse_root(d * d + a * a * across, dtype)
    across *= W * inverse
    of_A, of_D = W * (W * b * F - 1), W * W * W * b
    if OBJECTIVE == "encode":
        of_A += gain * (inverse * b + across * F)
        of_D -= gain * (inverse - across * W)
    return b, error, per_square, gain, d, inverse, across, of_A, of_D


@triton.jit(do_not_specialize=["T"])
def prepare_turns_back(
    k, v, gamma, decay, do, kept, turned, along, states, first_per_square, gram, reads, of_A, of_D, A, D, blocks, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `turn_slots_back` needs of a chunk: the products of its h and of its output gradients with its h (gram, reads
    [M, HV, 16, 16]) and with the slots at its start (to A and D [M, HV, K, 16]), of_A and of_D."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, n, is_first = block_place(blocks, m, T)
    if count > 0:
        dtype: tl.constexpr = v.dtype.element_ty
        place, in_head = first * HV + head, m * HV + head
        token, other = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
        channel = tl.arange(0, BV)[None, :]
        h, grad_o = rows_of(v, first, count, head, HV, V, BV), rows_of(do, first, count, head, HV, V, BV)
        square = tl.sum(h.to(tl.float32) * h.to(tl.float32), 1, keep_dims=True)
        in_pairs = (m * HV + head) * EVERY * EVERY + token * EVERY + other
        tl.store(gram + in_pairs, tl.dot(h, tl.trans(h), input_precision=PRECISION))
        tl.store(reads + in_pairs, tl.dot(grad_o, tl.trans(h), input_precision=PRECISION))
        states += (m * HV + head) * K * V
        for part in range(0, K, TILE):
            slot = tl.multiple_of(part + tl.arange(0, TILE)[None, :], [1, 1])
            F, W = load_steps(kept, turned, in_head, slot, token, K)
            _, _, _, _, _, _, _, from_A, from_D = step_again(
                k, gamma, decay, first_per_square, along, F, W, square, place, in_head, count, head, n, is_first, token,
                slot, HV, K, OBJECTIVE, HEADS_K, HEADS_GAMMA, HEADS_DECAY, dtype,
            )  # fmt: skip
            in_steps = step_places(in_head, token, slot, K)
            tl.store(of_A + in_steps, from_A, slot < K)
            tl.store(of_D + in_steps, from_D, slot < K)
            state_row = part + tl.arange(0, TILE)[:, None]
            S = tl.trans(tl.load(states + state_row * V + channel, (state_row < K) & (channel < V), 0.0))
            tl.store(A + in_steps, tl.dot(h, S, input_precision=PRECISION), slot < K)
            tl.store(D + in_steps, tl.dot(grad_o, S, input_precision=PRECISION), slot < K)


@triton.jit
def after_step(f, x, next_f, next_x):
    """Of a slot f s + x that goes through next_f s + next_x."""
    return f * next_f, next_f * x + next_x


@triton.jit(do_not_specialize=["T"])
def turn_slots_back(
    q, v, do, d_end, kept, turned, of_A, of_D, A, D, gram, reads, states, adjoints, d_start, cu_seqlens, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HEADS_K: tl.constexpr,
):  # fmt: skip
    """A and D [M, HV, K, 16]: before, the products of the slots at the chunk's start with h and with the output's gradient.
    adjoints [M, HV, K, V]: L at the chunk's end. d_start: L at the start, still to be divided by the slots' length."""
    n, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop, m = edges(cu_seqlens, n, T)
    token = tl.arange(0, EVERY)[:, None]
    slot = tl.multiple_of(part * TILE + tl.arange(0, TILE)[None, :], [1, 1])
    state_row = part * TILE + tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, BV)[None, :]
    inside = (state_row < K) & (channel < V)
    in_state = state_row * V + channel
    at = (n.to(tl.int64) * HV + head) * K * V
    dtype: tl.constexpr = v.dtype.element_ty
    L = tl.zeros((TILE, BV), tl.float32) if d_end is None else tl.load(d_end + at + in_state, inside, 0.0)
    blocks = tl.cdiv((stop - first).to(tl.int32), EVERY)
    begin = first + (blocks - 1) * EVERY
    m += blocks - 1
    for _ in range(0, blocks):
        left = tl.minimum(stop - begin, EVERY).to(tl.int32)
        place = begin * HV + head
        in_head = m * HV + head
        # The chunk before is fetched while this one is computed; it is whole.
        back_by = tl.where(begin > first, 1, 0)
        ahead, last = place - back_by * EVERY * HV, tl.where(begin > first, EVERY, left) - 1
        before_head = in_head - back_by * HV
        fetch_rows(v + ahead * V, last, HV * V, EVERY, V, dtype)
        fetch_rows(do + ahead * V, last, HV * V, EVERY, V, dtype)
        fetch_of_slots(q, ahead, part, last, HV, K, HEADS_K, dtype)
        fetch_steps(kept, before_head, part, K, dtype)
        fetch_steps(turned, before_head, part, K, dtype)
        fetch_steps(of_A, before_head, part, K, dtype)
        fetch_steps(of_D, before_head, part, K, dtype)
        fetch_steps(A, before_head, part, K, dtype)
        fetch_steps(D, before_head, part, K, dtype)
        fetch_rows(gram + before_head * EVERY * EVERY, 0, 0, 1, EVERY * EVERY, dtype)
        fetch_rows(reads + before_head * EVERY * EVERY, 0, 0, 1, EVERY * EVERY, dtype)
        fetch_rows(
            states + before_head * K * V + part * TILE * V, tl.minimum(K - part * TILE, TILE) - 1, V, TILE, V, dtype
        )
        h = rows_of(v, begin, left, head, HV, V, BV)
        S = tl.load(states + in_head * K * V + in_state, inside, 0.0)
        tl.store(adjoints + in_head * K * V + in_state, L.to(adjoints.dtype.element_ty), inside)
        y = tl.trans(product(L, tl.trans(h), dtype))
        S = S.to(tl.float32)
        ones = tl.full((BV, EVERY), 1.0, dtype)
        if dtype == tl.float32:
            z = tl.trans(tl.dot(L * S, ones, input_precision="tf32x3"))
        else:
            z = tl.trans(tl.dot((L * S).to(dtype), ones))
        query = of_slots(q, place, token, slot, left, HV, K, HEADS_K).to(tl.float32)
        F, W = load_steps(kept, turned, in_head, slot, token, K)
        from_A = of_steps(of_A, in_head, token, slot, K, 0.0)
        from_D = of_steps(of_D, in_head, token, slot, K, 0.0)
        slot_h = of_steps(A, in_head, token, slot, K, 0.0)
        slot_do = of_steps(D, in_head, token, slot, K, 0.0)
        # The layout of what was loaded last, as in `turn_slots`.
        y, z = tl.where(token < left, y, slot_do), row(tl.where(token < left, z, slot_do), token, 0)
        As = tl.zeros_like(y)
        Ds, X = As, As
        for back in tl.static_range(EVERY):
            t = EVERY - 1 - back
            query_t, f = row(query, token, t), row(F, token, t)
            y += query_t * tl.load(reads + in_head * EVERY * EVERY + t * EVERY + token)
            z += query_t * row(slot_do, token, t)
            D_t = row(y, token, t)
            kept_part, of_writes = tl.reduce(
                (tl.where(token < t, F, 1.0), tl.where(token < t, W * y, -0.0)), 0, after_step, keep_dims=True
            )
            A_t = kept_part * z + of_writes
            x = row(from_A, token, t) * A_t + row(from_D, token, t) * D_t
            now = token == t
            As, Ds, X = tl.where(now, A_t, As), tl.where(now, D_t, Ds), tl.where(now, x, X)
            y = f * y + x * tl.load(gram + in_head * EVERY * EVERY + t * EVERY + token)
            z = f * z + x * row(slot_h, token, t)
        in_steps = step_places(in_head, token, slot, K)
        tl.store(A + in_steps, As, slot < K)
        tl.store(D + in_steps, Ds, slot < K)
        before = tl.full((1, TILE), 1.0, tl.float32)
        for t in tl.static_range(EVERY):
            X = tl.where(token == t, before * X, X)
            before *= row(F, token, t)
            query = tl.where(token == t, before * query, query)
        L = tl.fma(tl.trans(-z), S, tl.trans(before) * L)
        if dtype == tl.float32:
            L += tl.dot(tl.trans(X), h, input_precision="tf32x3")
            L += tl.dot(tl.trans(query), rows_of(do, begin, left, head, HV, V, BV), input_precision="tf32x3")
        else:
            L = tl.dot(tl.trans(X.to(dtype)), h, L)
            L = tl.dot(tl.trans(query.to(dtype)), rows_of(do, begin, left, head, HV, V, BV), L)
        begin -= EVERY
        m -= 1
    if d_start is not None:
        tl.store(d_start + at + in_state, L, inside)


@triton.jit
def read_gradient(found, pairs, F, W, token, dtype: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    t, c = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
    joined = (t // (2 * SIZE) == c // (2 * SIZE)) & ((t & SIZE) > 0) & ((c & SIZE) == 0)
    before = (W * until_border(F, token, SIZE)).to(dtype)
    reached = tl.dot(tl.where(joined, pairs, 0.0).to(dtype), before, input_precision=PRECISION)
    return found + F * from_border(F, token, SIZE) * reached


@triton.jit(do_not_specialize=["T", "gates"])
def slot_gradients(
    k, v, gamma, decay, do, kept, turned, along, states, first_per_square, reads, scores, A, D, adjoints,
    dq, dk, dv, gate_parts, gates, d_start, blocks, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk. gate_parts [PARTS, 2, BT, HV]: those of gamma and decay in the first part, 0 in the others."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, n, is_first = block_place(blocks, m, T)
    if count > 0:
        dtype: tl.constexpr = v.dtype.element_ty
        place = first * HV + head
        t, c = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
        channel = tl.arange(0, BV)[None, :]
        h, grad_o = rows_of(v, first, count, head, HV, V, BV), rows_of(do, first, count, head, HV, V, BV)
        square = tl.sum(h.to(tl.float32) * h.to(tl.float32), 1, keep_dims=True)
        pairs = tl.load(reads + (m * HV + head) * EVERY * EVERY + t * EVERY + c)
        own_pair = tl.sum(tl.where(t == c, pairs, 0.0), 1, keep_dims=True)
        turns = tl.zeros((EVERY, EVERY), tl.float32)
        dh = tl.zeros((EVERY, BV), tl.float32)
        d_gain = tl.zeros((EVERY, 1), tl.float32)
        d_decay, of_h = d_gain, d_gain
        in_head = m * HV + head
        for part in range(0, K, TILE):
            slot = tl.multiple_of(part + tl.arange(0, TILE)[None, :], [1, 1])
            F, W = load_steps(kept, turned, in_head, slot, t, K)
            b, error, per_square, gain, d, inverse, across, of_A, of_D = step_again(
                k, gamma, decay, first_per_square, along, F, W, square, place, in_head, count, head, n, is_first, t, slot,
                HV, K, OBJECTIVE, HEADS_K, HEADS_GAMMA, HEADS_DECAY, dtype,
            )  # fmt: skip
            A_t = of_steps(A, in_head, t, slot, K, 0.0)
            D_t = of_steps(D, in_head, t, slot, K, 0.0)
            x = of_A * A_t + of_D * D_t
            E = F * A_t + W * D_t
            da = (D_t - b * A_t) * inverse - across * E
            inside = is_there(t, slot, count, K)
            at = t * (HV * K)
            tl.store(dk + place * K + slot + at, (gain * da).to(dk.dtype.element_ty), inside)
            d_gain += tl.sum(error * per_square * da, 1, keep_dims=True)
            of_h -= tl.sum(W * W * E, 1, keep_dims=True)
            if decay is not None:
                of_decay = W * (across * A_t + inverse * inverse * d * (b * A_t - D_t))
                d_decay += tl.sum(of_decay, 1, keep_dims=True)
            state_row = part + tl.arange(0, TILE)[:, None]
            in_state = in_head * K * V + state_row * V + channel
            in_tile = (state_row < K) & (channel < V)
            S = tl.load(states + in_state, in_tile, 0.0)
            if d_start is not None:  # noqa: SIM102 (one is known when compiling)
                if is_first:
                    # L is the gradient in the slots of length 1; their length n changes the first step.
                    by_length = row(-2 * gain * error * da, t, 0)
                    at_start = (n * HV + head) * K * V + state_row * V + channel
                    gradient = tl.load(d_start + at_start, in_tile, 0.0) + tl.trans(by_length) * S
                    gradient *= tl.trans(tl.sqrt(row(per_square, t, 0)))
                    tl.store(d_start + at_start, gradient, in_tile)
            since_start = from_border(F, t, EVERY)
            d_query = F * since_start * tl.dot(grad_o, tl.trans(S).to(dtype), input_precision=PRECISION) + W * own_pair
            d_query = read_gradient(d_query, pairs, F, W, t, dtype, PRECISION, 1)
            d_query = read_gradient(d_query, pairs, F, W, t, dtype, PRECISION, 2)
            d_query = read_gradient(d_query, pairs, F, W, t, dtype, PRECISION, 4)
            d_query = read_gradient(d_query, pairs, F, W, t, dtype, PRECISION, 8)
            tl.store(dq + place * K + slot + at, d_query.to(dq.dtype.element_ty), inside)
            turns = across_borders(turns, x, F, W, t, dtype, PRECISION)
            dh = tl.dot((x * since_start).to(dtype), S.to(dtype), dh, input_precision=PRECISION)
            L = tl.load(adjoints + in_state, in_tile, 0.0)
            dh = tl.dot((W * until_border(F, t, EVERY)).to(dtype), L.to(dtype), dh, input_precision=PRECISION)
        both = turns.to(dtype)
        dh = tl.dot(both, h, dh, input_precision=PRECISION)
        dh = tl.dot(tl.trans(both), h, dh, input_precision=PRECISION)
        scores += (m * HV + head) * EVERY * EVERY
        dh = tl.dot(tl.trans(tl.load(scores + t * EVERY + c)), grad_o, dh, input_precision=PRECISION)
        dh += of_h * h.to(tl.float32)
        tl.store(dv + place * V + channel + t * (HV * V), dh.to(dv.dtype.element_ty), (t < count) & (channel < V))
        gate = gate_parts + place + t * HV
        tl.store(gate, d_gain, t < count)
        tl.store(gate + gates, d_decay, t < count)
        for part in tl.static_range(1, PARTS):
            tl.store(gate + 2 * part * gates, tl.zeros_like(d_gain), t < count)
            tl.store(gate + (2 * part + 1) * gates, tl.zeros_like(d_gain), t < count)
