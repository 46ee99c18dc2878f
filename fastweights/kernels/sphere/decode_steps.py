"""The decode objective with slots of length 1, forward and backward: one program per sequence and head, token after token.

As `pass_tokens` and `pass_tokens_back`, with these differences.

Every lane has a slot of its own. A tile is [8, LK, W, RK, GV, 4], as in layout.py: eight lanes share the channels of RK slots, 4
or 8. Where every lane keeps the sum of one slot (of four slots two lanes have the same one), a sum over channels takes few
exchanges, and what follows from it is computed once per slot. `spread_to_tile` gives results back to all eight lanes. A vector
with a slot for every lane is [8, LK, W]. Of the bits of a slot's place among its eight or four, lanes have the lowest as their
highest: in this order the exchanges leave the numbers of a thread in their places.

Forward, the factors f of up to four tokens are kept apart, s = scale S, so that a token takes one operation per number of the
state: S <- S + w h / scale. Rounding changes the length of a slot by about 1e-7 per token, so slots get their length back every
16 tokens only. Outputs come from slot_outputs.py.

Backward, a token is undone, s <- (s - w h) / f, so that the state stays in registers. Every block of 16 tokens begins with the
kept state at its end. In a block where f is so small that rounding errors would grow, every state is found from the one at its
start. The factors f of a block are kept apart: s = scale S, and the gradient in a slot is L / scale, so that scale <- scale / f
undoes a token in both. Where nothing is undone, scale is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import halve
from ..common.math import reciprocal, to_float_or_nan
from .forward import (
    EVERY,
    FEW,
    LEAST_DECAY,
    bound_below,
    find_edges,
    inverse_square,
    load_first_slots,
    load_state,
    prefetch_tokens,
    store_state,
)
from .layout import (
    hide_layout,
    load_four,
    prefetch_rows,
    slot_and_channel,
    store_four,
    sum_over_channels,
    sum_over_slots,
    take_lane,
)
from .slot_steps import inverse_root


@triton.jit
def own_slot(LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr):
    """The slot of every lane, and which of the lanes with this slot it is."""
    lv, lk, warp = tl.arange(0, 8)[:, None, None], tl.arange(0, LK)[None, :, None], tl.arange(0, W)[None, None, :]
    last = lv % 2
    slot = hide_layout((warp * LK + lk) * RK + lv // 2 % 2 * 2 + lv // 4 + last * (RK - 4))
    return slot, (last if RK == 4 else 0) + 0 * slot


@triton.jit
def keep_one_of_two(x):
    """From x [P, Q, LK, W, R] one with half the slots per lane, [2 P, Q / 2, LK, W, R / 2]."""
    P: tl.constexpr = x.shape[0]
    Q: tl.constexpr = x.shape[1]
    LK: tl.constexpr = x.shape[2]
    W: tl.constexpr = x.shape[3]
    R: tl.constexpr = x.shape[4]
    even, odd = tl.split(tl.reshape(x, (P, 2, Q // 2, LK, W, R // 2, 2)))
    is_upper = (tl.arange(0, 2) > 0)[None, :, None, None, None, None]
    return tl.reshape(halve(even, odd, 1, is_upper), (2 * P, Q // 2, LK, W, R // 2))


@triton.jit
def sum_in_threads(x):
    """The sums of x [8, LK, W, R, GV, RV] over the channels of a thread [8, LK, W, R]. One after the other: products fuse with
    that."""
    return tl.sum(tl.reshape(x, (8, x.shape[1], x.shape[2], x.shape[3], x.shape[4] * x.shape[5])), 4)


@triton.jit
def sum_own_over_channels(x):
    """The sums of x [8, LK, W, RK, GV, RV] over channels, one slot per lane."""
    RK: tl.constexpr = x.shape[3]
    own = keep_one_of_two(keep_one_of_two(tl.reshape(sum_in_threads(x), (1, 8, x.shape[1], x.shape[2], RK))))
    own = tl.broadcast_to(tl.sum(own, 1, keep_dims=True), own.shape) if RK == 4 else keep_one_of_two(own)
    return tl.reshape(own, (8, x.shape[1], x.shape[2]))


@triton.jit
def take_two_lanes(x, lane: tl.constexpr, other: tl.constexpr):
    """The numbers of two lanes of eight, in all of them: from x [8, LK, W] [8, LK, W, 2]."""
    return tl.join(take_lane(x, tl.full((1, 1, 1), lane, tl.int32)), take_lane(x, tl.full((1, 1, 1), other, tl.int32)))


@triton.jit
def spread_to_tile(x, RK: tl.constexpr):
    """x [8, LK, W] as [8, LK, W, RK, 1, 1]."""
    if RK == 4:
        even, odd = take_two_lanes(x, 0, 2), take_two_lanes(x, 4, 6)
    else:
        even = tl.join(take_two_lanes(x, 0, 1), take_two_lanes(x, 2, 3))
        odd = tl.join(take_two_lanes(x, 4, 5), take_two_lanes(x, 6, 7))
    return tl.reshape(tl.join(even, odd), (8, x.shape[1], x.shape[2], RK, 1, 1))


@triton.jit
def dot_over_channels(x, y):
    """x.y of vectors [8, LK, W, 1, GV, RV], in every lane [8, LK, W]."""
    thread_sum = tl.reshape(sum_in_threads(x * y), (8, x.shape[1], x.shape[2]))
    return tl.broadcast_to(tl.sum(thread_sum, 0, keep_dims=True), thread_sum.shape)


@triton.jit
def sum_over_four_slots(x):
    """The sum of x [8, LK, W] over the slots of eight lanes that share four. The two lanes of a slot may have numbers, and
    sums, of their own."""
    slots = tl.reshape(x, (4, 2, x.shape[1], x.shape[2]))
    return tl.reshape(tl.broadcast_to(tl.sum(slots, 0, keep_dims=True), slots.shape), x.shape)


@triton.jit
def load_own(x, slot, mask, K: tl.constexpr):
    return tl.load(x + slot, mask & (slot < K), 0.0)


@triton.jit
def store_own(x, slot, values, mask, K: tl.constexpr):
    tl.store(x + slot, values.to(x.dtype.element_ty), mask & (slot < K))


@triton.jit
def load_own_start(start, length, own, K: tl.constexpr, V: tl.constexpr):
    """Of the initial slots 1 / n^2, and whether there is a slot (1 or 0), one slot per lane."""
    if start is None:
        alive = tl.where(own < min(K, V), 1.0, 0.0)
        return alive, alive
    per_square = inverse_square(sum_own_over_channels(length) / 8)  # all eight lanes have the length
    return per_square, tl.where(per_square > 0, 1.0, 0.0)


MOST = tl.constexpr(2.0**60)  # factors that a backward may keep apart
LEAST_FACTOR = tl.constexpr(2.0**-25)  # what a smaller factor leaves of a slot is lost in its sum with w h


@triton.jit
def load_token(
    k, v, gamma, decay, place, here, channel, own,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Key of the lane's own slots, value, gamma and decay of a token, as they are in memory."""
    gain = tl.load(gamma + place // HEADS_GAMMA, here, 0.0)
    return (
        load_own(k + place // HEADS_K * K, own, here, K),
        load_four(v + place * V, 0, channel, here, V, 5),
        gain,
        gain if decay is None else tl.load(decay + place // HEADS_DECAY, here, 0.0),
    )


@triton.jit(do_not_specialize=["T"])
def decode_tokens(
    k, v, gamma, decay, start, kept, turned, along, answers, states, end, steep, cu_seqlens, T, HV,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr,
):  # fmt: skip
    """kept, turned, along [BT, HV, K]: f, w and b. answers [BT, HV, V]: h. states [M, HV, K, V]: every 16 tokens.
    steep [M, HV, W]: 1 where f is too small over a block of 16 tokens for a backward to undo them, of the slots of every warp."""
    n, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = k.dtype.element_ty
    # A backward divides by the product of f of up to 16 tokens; this much of a state's digits may get lost there.
    LEAST: tl.constexpr = 2.0**-4 if dtype == tl.float32 else 2.0**-10
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, GV, RV)
    own, copy = own_slot(LK, W, RK)
    stores_channels = thread // LV == 0
    at = (n.to(tl.int64) * HV + head) * K * V
    S, length = load_first_slots(start, at, slot, channel, K, V)
    per_square, alive = load_own_start(start, length, own, K, V)
    place = first * HV + head
    now = load_token(k, v, gamma, decay, place, first < stop, channel, own, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY)
    answer = sum_over_slots(S * spread_to_tile(now[0].to(tl.float32), RK))
    ones = alive * 0.0 + 1.0
    for block in range(first, stop, EVERY):
        store_state(states + (m * HV + head) * K * V, slot, channel, S, K, V)
        # The interpreter runs float32, and does without.
        if dtype != tl.float32:
            coming = tl.minimum(stop - block - EVERY, EVERY).to(tl.int32)
            if coming > 0:
                prefetch_tokens(
                    None, k, v, gamma, decay, (block + EVERY) * HV + head, coming, HV, K, V, HEADS_K, HEADS_GAMMA,
                    HEADS_DECAY,
                )  # fmt: skip
        least, most = ones, ones  # of |f .. f| from any token of the block on to its last
        for few in range(block, tl.minimum(block + EVERY, stop), FEW):
            scale = ones
            for t in range(few, tl.minimum(few + FEW, stop)):
                ahead = load_token(
                    k, v, gamma, decay, place + HV, t + 1 < stop, channel, own, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY
                )
                # Infinities that get into the state come out of its sums as NaN; elsewhere they are made NaN.
                h = now[1].to(tl.float32) - answer
                b = scale * sum_own_over_channels(S * h)
                square = dot_over_channels(h, h)
                gain = to_float_or_nan(now[2])
                a = gain * per_square * now[0].to(tl.float32)
                across = bound_below(square - b * b, 0.0)
                if decay is None:
                    inverse = inverse_root(1.0 + a * a * across, dtype)
                    f = (1.0 - a * b) * inverse
                else:
                    d = bound_below(to_float_or_nan(now[3]), LEAST_DECAY)
                    inverse = inverse_root(d * d + a * a * across, dtype)
                    f = (d - a * b) * inverse
                w = a * inverse
                least = tl.abs(f) * tl.where(least > 1, 1.0, least)
                most = tl.abs(f) * tl.where(most < 1, 1.0, most)
                scale *= tl.where(tl.abs(f) < LEAST_FACTOR, LEAST_FACTOR, f)
                S += spread_to_tile(w * reciprocal(scale, "tf32" if dtype != tl.float32 else "ieee"), RK) * h
                answer = sum_over_slots(S * spread_to_tile(scale * ahead[0].to(tl.float32), RK))
                store_own(kept + place * K, own, f, copy == 0, K)
                store_own(turned + place * K, own, w, copy == 0, K)
                store_own(along + place * K, own, b, copy == 0, K)
                store_four(answers + place * V, 0, channel, h, stores_channels, V, 5)
                if start is not None:
                    per_square = alive
                now = ahead
                place += HV
            S *= spread_to_tile(scale, RK)
        lost = tl.where((least >= LEAST) & (most <= MOST) | (own >= K), 0, 1)  # 1 for NaN
        tl.store(steep + (m * HV + head) * W + tl.arange(0, W), tl.max(tl.max(lost, 1), 0))
        square = sum_over_channels(S * S)
        S *= tl.where(square == 0, 0.0, tl.rsqrt(square))
        m += 1
    if end is not None:
        store_state(end + at, slot, channel, S * tl.where(stop > first, tl.where(length == 0, 0.0, 1.0), length), K, V)


@triton.jit
def replay_steps(state, kept, turned, answers, place, count, HV, slot, channel, K: tl.constexpr, V: tl.constexpr):
    """The state after `count` tokens from `place` on, from the kept state before them."""
    S = load_state(state, slot, channel, K, V)
    for _ in range(0, count):
        f = load_four(kept + place * K, 0, slot, True, K, 3)
        w = load_four(turned + place * K, 0, slot, True, K, 3)
        S = f * S + w * load_four(answers + place * V, 0, channel, True, V, 5)
        place += HV
    return S


@triton.jit
def prefetch_block(
    q, k, gamma, decay, do, kept, turned, along, answers, place, HV,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """A whole block, from `place` on."""
    prefetch_rows(q, place // HEADS_K, EVERY, HV // HEADS_K, K, EVERY)
    prefetch_rows(k, place // HEADS_K, EVERY, HV // HEADS_K, K, EVERY)
    prefetch_rows(do, place, EVERY, HV, V, EVERY)
    prefetch_rows(gamma, place // HEADS_GAMMA, EVERY, HV // HEADS_GAMMA, 1, EVERY)
    if decay is not None:
        prefetch_rows(decay, place // HEADS_DECAY, EVERY, HV // HEADS_DECAY, 1, EVERY)
    prefetch_rows(kept, place, EVERY, HV, K, EVERY)
    prefetch_rows(turned, place, EVERY, HV, K, EVERY)
    prefetch_rows(along, place, EVERY, HV, K, EVERY)
    prefetch_rows(answers, place, EVERY, HV, V, EVERY)


@triton.jit(do_not_specialize=["T", "gates"])
def decode_tokens_back(
    q, k, gamma, decay, start, do, d_end, kept, turned, along, answers, states,
    dq, dk, dv, gate_parts, gates, d_start, steep, cu_seqlens, T, HV,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """gate_parts [W, 2, BT, HV], parts of the gradients of gamma and decay, `gates` = BT HV from one to the other; steep
    [M, HV, FLAGS]; the rest as `decode_tokens` has it."""
    dtype: tl.constexpr = q.dtype.element_ty
    n, head = tl.program_id(0), tl.program_id(1)
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, GV, RV)
    own, copy = own_slot(LK, W, RK)
    lane, lk, warp = tl.arange(0, LV)[:, None, None], tl.arange(0, LK)[None, :, None], tl.arange(0, W)[None, None, :]
    stores_channels = thread // LV == 0
    at = (n.to(tl.int64) * HV + head) * K * V
    S, length = load_first_slots(start, at, slot, channel, K, V)
    first_per_square, alive = load_own_start(start, length, own, K, V)
    ones = alive * 0.0 + 1.0
    first_gradient = alive * 0.0  # in the logarithm of the slots' lengths
    L = tl.zeros_like(S) if d_end is None else load_state(d_end + at, slot, channel, K, V)
    place = (stop - 1) * HV + head
    blocks = ((stop - first + EVERY - 1) // EVERY).to(tl.int32)
    for block in range(0, blocks):
        begin = (first + (blocks - 1 - block) * EVERY) * HV + head
        count = ((place - begin) // HV + 1).to(tl.int32)
        in_head = (m + blocks - 1 - block) * HV + head
        state = states + in_head * K * V
        is_steep = tl.load(steep + in_head * FLAGS)
        for flag in tl.static_range(1, FLAGS):
            is_steep |= tl.load(steep + in_head * FLAGS + flag)
        # The interpreter runs float32, and does without.
        if dtype != tl.float32:  # noqa: SIM102 (one is known when compiling)
            if block + 1 < blocks:
                prefetch_rows(state, 0, K, 1, V, LK * W * RK)
                prefetch_block(
                    q, k, gamma, decay, do, kept, turned, along, answers, begin - EVERY * HV, HV, K, V, HEADS_K, HEADS_GAMMA,
                    HEADS_DECAY,
                )  # fmt: skip
        if block == 0:
            S = replay_steps(state, kept, turned, answers, begin, count, HV, slot, channel, K, V)
        else:
            S = load_state(state + HV * K * V, slot, channel, K, V)
        scale, inverse_scale = ones, ones
        for back in range(0, count):
            in_head = place // HEADS_K * K
            query = to_float_or_nan(load_own(q + in_head, own, True, K))
            key = to_float_or_nan(load_own(k + in_head, own, True, K))
            b = load_own(along + place * K, own, True, K)
            f = load_own(kept + place * K, own, True, K)
            w = load_own(turned + place * K, own, True, K)
            h = load_four(answers + place * V, 0, channel, True, V, 5)
            grad_o = load_four(do + place * V, 0, channel, True, V, 5).to(tl.float32)
            gain = to_float_or_nan(tl.load(gamma + place // HEADS_GAMMA))
            store_own(dq + place * K, own, scale * sum_own_over_channels(S * grad_o), copy == 0, K)
            w_tile = spread_to_tile(w * inverse_scale, RK)
            L += spread_to_tile(query * scale, RK) * grad_o
            D, square = inverse_scale * sum_own_over_channels(L * h), dot_over_channels(h, h)
            if is_steep:
                S = replay_steps(state, kept, turned, answers, begin, count - 1 - back, HV, slot, channel, K, V)
            else:
                S -= w_tile * h
                scale *= reciprocal(tl.where(own < K, f, 1.0), "tf32" if dtype != tl.float32 else "ieee")
            A = inverse_scale * scale * sum_own_over_channels(L * S)
            # What of L lies along the slots after the token: it changes nothing, and would grow.
            E = f * A + w * D
            A -= E * (f + w * b)
            D -= E * (f * b + w * square)
            per_square = alive if start is None else tl.where(place == first * HV + head, first_per_square, alive)
            a = gain * per_square * key
            across = bound_below(square - b * b, 0.0)
            d = (
                1.0
                if decay is None
                else bound_below(to_float_or_nan(tl.load(decay + place // HEADS_DECAY)), LEAST_DECAY)
            )
            inverse = inverse_root(d * d + a * a * across, dtype)
            da = (D - b * A) * inverse
            grad_b = spread_to_tile(-w * (A + f * E) * scale, RK)  # the gradient of b, and what lies along the slot
            along_h = tl.reshape(sum_over_four_slots(w * w * E), (LV, LK, W, 1, 1, 1))
            dh = sum_over_slots(
                tl.sum(w_tile * L, 3, keep_dims=True) + tl.sum(grad_b * S, 3, keep_dims=True) - along_h * h
            )
            if is_steep:
                L *= spread_to_tile(f, RK)
            else:
                inverse_scale *= f
            L += grad_b * h
            L -= spread_to_tile(f * f * E * scale * scale, RK) * S
            L -= spread_to_tile(key * scale, RK) * dh
            d_key = gain * per_square * da - scale * sum_own_over_channels(S * dh)
            first_gradient = -2 * a * da
            # Every warp writes its part of the sums over slots: the first of a slot's lanes for gamma, the second for decay.
            d_gate = key * per_square * da
            if decay is not None:
                d_decay = w * inverse * (across * w * A + inverse * d * (b * A - D))
                d_gate = tl.where(copy == 0, d_gate, d_decay)
            d_gate = tl.sum(sum_over_four_slots(d_gate), 1, keep_dims=True)
            gates_at = gate_parts + (2 * warp + lane + 0 * lk) * gates + place
            tl.store(gates_at, tl.broadcast_to(d_gate, gates_at.shape), (lane < 2) & (lk == 0))
            store_own(dk + place * K, own, d_key, copy == 0, K)
            store_four(dv + place * V, 0, channel, dh, stores_channels, V, 5)
            place -= HV
        L *= spread_to_tile(inverse_scale, RK)
    if d_start is not None:
        if blocks > 0:
            S, length = load_first_slots(start, at, slot, channel, K, V)
            inverse_length = tl.where(length == 0, 0.0, 1.0 / length)
            L = inverse_length * (L + (spread_to_tile(first_gradient, RK) - sum_over_channels(L * S)) * S)
        store_state(d_start + at, slot, channel, L, K, V)
