"""The backward of the same: one program per sequence and head, from the last token to the first.

Of every 16 tokens the states are found again from the kept one, without a sum: a token is S <- f S + w h with f, w and h written
by the forward. The state of every fourth token goes to `scratch`; those between are computed when their turn comes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import float_or_nan
from .forward import EVERY, FEW, LEAST_DECAY, SHORTEST, edges, first_slots, has_grown, inverse_square, not_below
from .layout import over_channels, over_slots, over_slots_of_warp, slot_and_channel


@triton.jit
def raw_step(
    k, v, gamma, kept, turned, answers, writes, place, here, slot, channel, is_slot, is_channel,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
):  # fmt: skip
    """What f, w and h of a token follow from."""
    is_slot, is_channel = is_slot & here, is_channel & here
    gain = tl.load(gamma + place // HEADS_GAMMA, here, 0.0)
    key = tl.load(k + place // HEADS_K * K + slot, is_slot, 0.0)
    if OBJECTIVE == "ttt":
        step = gain, key, tl.load(writes + place * V + channel, is_channel, 0.0)
    else:
        f = tl.load(kept + place * K + slot, is_slot, 0.0)
        w = tl.load(turned + place * K + slot, is_slot, 0.0)
        if OBJECTIVE == "decode":
            step = f, w, tl.load(answers + place * V + channel, is_channel, 0.0)
        else:
            step = f, w, tl.load(v + place * V + channel, is_channel, 0.0)
    return step


@triton.jit
def converted_step(step, OBJECTIVE: tl.constexpr):
    """f, w and h."""
    if OBJECTIVE == "ttt":
        found = 1.0, float_or_nan(step[0]) * float_or_nan(step[1]), step[2]
    elif OBJECTIVE == "decode":
        found = step[0], step[1], step[2]
    else:
        found = step[0], step[1], float_or_nan(step[2])
    return found


@triton.jit
def raw_rest(
    q, k, v, gamma, decay, do, along, lengths, answers, place, here, slot, channel, is_slot, is_channel,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, NORMALIZE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Of a token: query, key, gradient of the output, gamma, decay, and b (TTT: value), its slots' length (TTT: answer)."""
    has_slot, has_channel = is_slot & here, is_channel & here
    query = tl.load(q + place // HEADS_K * K + slot, has_slot, 0.0)
    key = tl.load(k + place // HEADS_K * K + slot, has_slot, 0.0)
    grad_o = tl.load(do + place * V + channel, has_channel, 0.0)
    gain = tl.load(gamma + place // HEADS_GAMMA, here, 0.0)
    kept = gain if decay is None else tl.load(decay + place // HEADS_DECAY, here, 0.0)
    if OBJECTIVE == "ttt":
        one = tl.load(v + place * V + channel, has_channel, 0.0)
        other = tl.load(answers + place * V + channel, has_channel, 0.0)
    else:
        one = tl.load(along + place * K + slot, has_slot, 0.0)
        other = one if NORMALIZE else tl.load(lengths + place * K + slot, has_slot, 0.0)
    return query, key, grad_o, gain, kept, one, other


@triton.jit
def back_through_answer(L, S, key, value, answer, h, gain):
    """Through the token's write and its answer S^T k: L before it, and the gradients of v, k and gamma."""
    d_gained = over_slots(L * key)
    dh = gain * d_gained
    square = over_channels(answer * answer)
    short = square < SHORTEST * SHORTEST
    r = tl.where(short, 1.0, tl.rsqrt(square))
    cubed = tl.where(short, 0.0, r * r * r)
    p = tl.where(short, 1.0, over_channels(answer * value) * cubed)
    along_answer, along_value = over_channels(answer * dh), over_channels(value * dh)
    turned = tl.where(short, 0.0, 3 * p * r * r) * along_answer - cubed * along_value
    d_answer = turned * answer - cubed * along_answer * value - p * dh
    d_key = gain * over_channels(L * h) + over_channels(S * d_answer)
    return L + key * d_answer, r * dh - cubed * along_answer * answer, d_key, over_channels(d_gained * h)


@triton.jit
def back_through_turn(
    L, N, S, key, h, gain, d, f, w, b, length, per_square, is_last, read,
    OBJECTIVE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Through the token's turn of every slot: L and N before it, and the gradients of h, k, gamma (slot by slot) and decay
    (likewise)."""
    A, D, square = over_channels(L * S), over_channels(L * h), over_channels(h * h)
    E = f * A + w * D  # what of L lies along the slots after the token: it changes nothing, and would grow
    N = tl.where(length > SHORTEST, tl.where(is_last, E, N + read), 0.0)
    N = tl.zeros_like(E) if NORMALIZE else N
    A -= E * (f + w * b)
    D -= E * (f * b + w * square)
    error = key - b if OBJECTIVE == "encode" else key
    a = gain * error * per_square
    across = not_below(square - b * b, 0.0)
    inverse = tl.rsqrt(d * d + a * a * across)
    across *= w * inverse
    step = inverse * inverse * d
    d_decay = w * (across * A + step * (b * A - D)) + step * N
    da = (D - b * A) * inverse + across * N
    db = -w * A - w * w * b * N
    d_key = gain * per_square * da
    d_gain = error * per_square * da
    if OBJECTIVE == "encode":
        db -= d_key
    from_start = db - w * f * E
    dh = over_slots(w * L + from_start * S + w * w * (N - E) * h)
    L = f * (L - f * E * S) + from_start * h
    if OBJECTIVE == "decode":  # h = v - S^T k
        d_key -= over_channels(S * dh)
        L -= key * dh
    return L, N - 2 * a * da, dh, d_key, d_gain, d_decay


@triton.jit(do_not_specialize=["T", "gates"])
def pass_tokens_back(
    q, k, v, gamma, decay, start, do, d_end, kept, turned, along, lengths, answers, writes, states, scratch,
    dq, dk, dv, gate_parts, gates, d_start, grown, cu_seqlens, T, HV,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, NORMALIZE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr,
):  # fmt: skip
    """scratch [N, HV, 4, K, V]; gate_parts [W, 2, BT, HV], parts of the gradients of gamma and decay (TTT: gamma's alone, whole),
    `gates` = BT HV from one to the other; the rest as `pass_tokens` has it."""
    n, head = tl.program_id(0), tl.program_id(1)
    if grown is not None:  # noqa: SIM102 (one is known when compiling)
        if not has_grown(grown, n * HV + head, K):
            return
    first, stop, m = edges(cu_seqlens, n, T)
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, RV)
    is_slot, is_channel = slot < K, channel < V
    inside = is_slot & is_channel
    lane = thread % LV
    stored_slot, stored = is_slot & (lane == 0), is_channel & (thread // LV == 0)
    in_state = slot * V + channel
    at = (n.to(tl.int64) * HV + head) * K * V
    scratch += at * 4
    if OBJECTIVE != "ttt":
        S, first_length = first_slots(start, at, slot, channel, inside, V)
        alive, first_per_square = tl.where(first_length == 0, 0.0, 1.0), inverse_square(first_length)
        N = tl.zeros((LV, LK, W, RK, 1), tl.float32)  # the gradient in the logarithm of the slots' lengths
    if d_end is None:
        L = tl.zeros((LV, LK, W, RK, RV), tl.float32)
    else:
        L = tl.load(d_end + at + in_state, inside, 0.0)
        if OBJECTIVE != "ttt" and not NORMALIZE:
            some = stop > first
            L *= tl.load(lengths + ((stop - 1) * HV + head) * K + slot, is_slot & some, 1.0)
    blocks = ((stop - first + EVERY - 1) // EVERY).to(tl.int32)
    last, here = stop - 1, stop > first
    now_step = raw_step(
        k, v, gamma, kept, turned, answers, writes, last * HV + head, here, slot, channel, is_slot, is_channel, K, V,
        OBJECTIVE, HEADS_K, HEADS_GAMMA,
    )  # fmt: skip
    now = raw_rest(
        q, k, v, gamma, decay, do, along, lengths, answers, last * HV + head, here, slot, channel, is_slot, is_channel, K, V,
        OBJECTIVE, NORMALIZE, HEADS_K, HEADS_GAMMA, HEADS_DECAY,
    )  # fmt: skip
    for block in range(0, blocks):
        token = first + (blocks - 1 - block) * EVERY
        parts = (tl.minimum(stop - token, EVERY).to(tl.int32) + FEW - 1) // FEW
        S = tl.load(states + ((m + blocks - 1 - block) * HV + head) * K * V + in_state, inside, 0.0).to(tl.float32)
        tl.store(scratch + in_state, S, inside)
        for part in range(1, parts):
            for i in tl.static_range(FEW):
                f, w, h = converted_step(
                    raw_step(
                        k, v, gamma, kept, turned, answers, writes, (token + (part - 1) * FEW + i) * HV + head, True, slot,
                        channel, is_slot, is_channel, K, V, OBJECTIVE, HEADS_K, HEADS_GAMMA,
                    ),
                    OBJECTIVE,
                )  # fmt: skip
                S = f * S + w * h
            tl.store(scratch + part * K * V + in_state, S, inside)
        for part in range(0, parts):
            begin = token + (parts - 1 - part) * FEW
            base = tl.load(scratch + (parts - 1 - part) * K * V + in_state, inside, 0.0)
            for back in tl.static_range(FEW):
                t = begin + (FEW - 1 - back)
                if t < stop:
                    place = t * HV + head
                    query, key, gain = float_or_nan(now[0]), float_or_nan(now[1]), float_or_nan(now[3])
                    grad_o = now[2].to(tl.float32)
                    d = 1.0 if decay is None else not_below(float_or_nan(now[4]), LEAST_DECAY)
                    one, other = now[5], now[6]
                    f, w, h = converted_step(now_step, OBJECTIVE)
                    now_step = raw_step(
                        k, v, gamma, kept, turned, answers, writes, place - HV, t > first, slot, channel, is_slot, is_channel,
                        K, V, OBJECTIVE, HEADS_K, HEADS_GAMMA,
                    )  # fmt: skip
                    now = raw_rest(
                        q, k, v, gamma, decay, do, along, lengths, answers, place - HV, t > first, slot, channel, is_slot,
                        is_channel, K, V, OBJECTIVE, NORMALIZE, HEADS_K, HEADS_GAMMA, HEADS_DECAY,
                    )  # fmt: skip
                    S = base
                    for i in tl.static_range(FEW - 1 - back):
                        f_i, w_i, h_i = converted_step(
                            raw_step(
                                k, v, gamma, kept, turned, answers, writes, (begin + i) * HV + head, True, slot, channel,
                                is_slot, is_channel, K, V, OBJECTIVE, HEADS_K, HEADS_GAMMA,
                            ),
                            OBJECTIVE,
                        )  # fmt: skip
                        S = f_i * S + w_i * h_i
                    d_query = f * over_channels(S * grad_o) + w * over_channels(h * grad_o)
                    if OBJECTIVE == "ttt":
                        L, d_value, d_key, d_gain = back_through_answer(
                            L + query * grad_o, S, key, float_or_nan(one), other, h, gain
                        )
                        tl.store(gate_parts + place + 0 * thread, d_gain, thread == 0)
                    else:
                        if NORMALIZE:
                            length = alive
                            per_square = tl.where(t == first, first_per_square, alive)
                        else:
                            length = other
                            per_square = tl.where(t == first, first_per_square, inverse_square(now[6]))
                            d_query *= length
                        read = query * d_query
                        query *= length
                        L, N, d_value, d_key, d_gain, d_decay = back_through_turn(
                            L + query * grad_o, N, S, key, h, gain, d, f, w, one, length, per_square, t == stop - 1, read,
                            OBJECTIVE, NORMALIZE,
                        )  # fmt: skip
                        # Every warp writes its part of the sums over slots: the first lane for gamma, the second for decay.
                        part_sum = over_slots_of_warp(tl.where(lane == 0, d_gain, d_decay))
                        tl.store(gate_parts + (2 * (thread // 32) + lane) * gates + place, part_sum, lane < 2)
                    tl.store(dq + place * K + slot, d_query.to(dq.dtype.element_ty), stored_slot)
                    tl.store(dk + place * K + slot, d_key.to(dk.dtype.element_ty), stored_slot)
                    tl.store(dv + place * V + channel, d_value.to(dv.dtype.element_ty), stored)
    if d_start is not None:
        if OBJECTIVE != "ttt":  # noqa: SIM102 (one is known when compiling)
            if blocks > 0:
                S, _ = first_slots(start, at, slot, channel, inside, V)
                per_length = tl.where(first_length == 0, 0.0, 1.0 / first_length)
                L = per_length * (L + (N - over_channels(L * S)) * S)
        tl.store(d_start + at + in_state, L, inside)
