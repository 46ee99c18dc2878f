"""The backward of the same: one program per sequence and head, from the last token to the first.

Of every 16 tokens the states are found again from the kept one, without a sum: a token is S <- f S + w h with f, w and h written
by the forward. The state of every fourth token goes to `scratch`; those between are computed from it when their turn comes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
from .forward import (
    EVERY,
    FEW,
    LEAST_DECAY,
    SHORTEST,
    bound_below,
    find_edges,
    find_turn,
    has_grown,
    inverse_length,
    inverse_square,
    load_first_slots,
    load_state,
    load_step_slots,
    step_address,
    store_state,
    store_step_slots,
)
from .layout import (
    load_four,
    prefetch_rows,
    slot_and_channel,
    store_four,
    sum_over_channels,
    sum_over_slots,
    sum_over_warp_slots,
)


@triton.jit
def load_step(
    v, kept, turned, answers, place, step, slot, channel,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, BY_CHUNKS: tl.constexpr,
):  # fmt: skip
    """f, w and h of a token; step: see `step_address`."""
    f = load_step_slots(kept + step, slot, K, BY_CHUNKS)
    w = load_step_slots(turned + step, slot, K, BY_CHUNKS)
    if OBJECTIVE == "decode":
        h = load_four(answers + place * V, 0, channel, True, V, 5)
    else:
        h = to_float_or_nan(load_four(v + place * V, 0, channel, True, V, 5))
    return f, w, h


@triton.jit
def take_step(
    S, v, kept, turned, answers, place, step, slot, channel,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, BY_CHUNKS: tl.constexpr,
):  # fmt: skip
    """The state after a token from the one before it."""
    f, w, h = load_step(v, kept, turned, answers, place, step, slot, channel, K, V, OBJECTIVE, BY_CHUNKS)
    return f * S + w * h


@triton.jit
def load_rest(
    q, k, gamma, decay, do, along, lengths, place, step, slot, channel,
    K: tl.constexpr, V: tl.constexpr, NORMALIZE: tl.constexpr, BY_CHUNKS: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Of a token: query, key, gradient of the output, gamma, decay, b and, where lengths are free, its slots' length."""
    query = to_float_or_nan(load_four(q + place // HEADS_K * K, 0, slot, True, K, 3))
    key = to_float_or_nan(load_four(k + place // HEADS_K * K, 0, slot, True, K, 3))
    grad_o = load_four(do + place * V, 0, channel, True, V, 5).to(tl.float32)
    gain = to_float_or_nan(tl.load(gamma + place // HEADS_GAMMA))
    d = 1.0 if decay is None else bound_below(to_float_or_nan(tl.load(decay + place // HEADS_DECAY)), LEAST_DECAY)
    b = load_step_slots(along + step, slot, K, BY_CHUNKS)
    length = b if NORMALIZE else load_four(lengths + place * K, 0, slot, True, K, 3)
    return query, key, grad_o, gain, d, b, length


@triton.jit
def prefetch_block(
    q, k, v, gamma, decay, do, kept, turned, along, answers, place, step, HV,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, BY_CHUNKS: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """A whole block, from `place` on; step: of its first token, see `step_address`."""
    prefetch_rows(q, place // HEADS_K, EVERY, HV // HEADS_K, K, EVERY)
    prefetch_rows(k, place // HEADS_K, EVERY, HV // HEADS_K, K, EVERY)
    prefetch_rows(do, place, EVERY, HV, V, EVERY)
    prefetch_rows(gamma, place // HEADS_GAMMA, EVERY, HV // HEADS_GAMMA, 1, EVERY)
    if decay is not None:
        prefetch_rows(decay, place // HEADS_DECAY, EVERY, HV // HEADS_DECAY, 1, EVERY)
    if BY_CHUNKS:
        prefetch_rows(along + step, 0, 1, HV, K * EVERY, 1)
    else:
        prefetch_rows(kept + step, 0, EVERY, HV, K, EVERY)
        prefetch_rows(turned + step, 0, EVERY, HV, K, EVERY)
        prefetch_rows(along + step, 0, EVERY, HV, K, EVERY)
    prefetch_rows(answers if OBJECTIVE == "decode" else v, place, EVERY, HV, V, EVERY)


@triton.jit
def find_steps_again(
    S, q, k, v, gamma, decay, do, kept, turned, along, scratch, token, first, stop, m, HV, head, slot, channel, stores_slots,
    first_per_square, alive,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """f and w of the block that begins at `token`, which the forward by chunks does not keep, and every fourth state to
    `scratch`. S: the state before the block. As in `pass_tokens`, slots are brought to length 1, or what they are off by would
    grow."""
    for t in range(token, tl.minimum(token + EVERY, stop)):
        number = (t - token).to(tl.int32)
        if number % FEW == 0:
            store_state(scratch + number // FEW * K * V, slot, channel, S, K, V)
        place, step = t * HV + head, step_address(t, first, m, HV, head, K, True)
        h = to_float_or_nan(load_four(v + place * V, 0, channel, True, V, 5))
        _, key, _, gain, d, b, _ = load_rest(
            q, k, gamma, decay, do, along, None, place, step, slot, channel, K, V, True, True, HEADS_K, HEADS_GAMMA,
            HEADS_DECAY,
        )  # fmt: skip
        per_square = tl.where(t == first, first_per_square, alive)
        f, w, _ = find_turn(key, h, gain, d, b, inverse_length(S), per_square, OBJECTIVE)
        store_step_slots(kept + step, slot, f, stores_slots, K, True)
        store_step_slots(turned + step, slot, w, stores_slots, K, True)
        S = f * S + w * h
    tl.debug_barrier()


@triton.jit
def differentiate_turn(
    L, N, S, key, h, gain, d, f, w, b, length, per_square, is_last, read,
    OBJECTIVE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Through the token's turn of every slot: L and N before it, and the gradients of h, k, gamma (slot by slot) and decay
    (likewise)."""
    A, D, square = sum_over_channels(L * S), sum_over_channels(L * h), sum_over_channels(h * h)
    E = f * A + w * D  # what of L lies along the slots after the token: it changes nothing, and would grow
    N = tl.where(length > SHORTEST, tl.where(is_last, E, N + read), 0.0)
    N = tl.zeros_like(E) if NORMALIZE else N
    A -= E * (f + w * b)
    D -= E * (f * b + w * square)
    error = key - b if OBJECTIVE == "encode" else key
    a = gain * error * per_square
    across = bound_below(square - b * b, 0.0)
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
    along_h = tl.sum(w * w * (N - E), 3, keep_dims=True)
    dh = sum_over_slots(tl.sum(w * L + from_start * S, 3, keep_dims=True) + along_h * h)
    L = f * (L - f * E * S) + from_start * h
    if OBJECTIVE == "decode":  # h = v - S^T k
        d_key -= sum_over_channels(S * dh)
        L -= key * dh
    return L, N - 2 * a * da, dh, d_key, d_gain, d_decay


@triton.jit(do_not_specialize=["T", "gates"])
def pass_tokens_back(
    q, k, v, gamma, decay, start, do, d_end, kept, turned, along, lengths, answers, states, scratch,
    dq, dk, dv, gate_parts, gates, d_start, grown, cu_seqlens, T, HV,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, NORMALIZE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr,
):  # fmt: skip
    """scratch [N, HV, 4, K, V]; gate_parts [W, 2, BT, HV], parts of the gradients of gamma and decay, `gates` = BT HV from one to
    the other; kept, turned: where tokens are taken by chunks, memory for f and w; the rest as `pass_tokens` has it."""
    n, head = tl.program_id(0), tl.program_id(1)
    if grown is not None:  # noqa: SIM102 (one is known when compiling)
        if not has_grown(grown, n * HV + head, K):
            return
    BY_CHUNKS: tl.constexpr = grown is not None
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, GV, RV)
    lane = thread % LV
    stores_slots, stores_channels = lane == 0, thread // LV == 0
    at = (n.to(tl.int64) * HV + head) * K * V
    scratch += at * 4
    S, first_length = load_first_slots(start, at, slot, channel, K, V)
    alive = first_length if start is None else tl.where(first_length == 0, 0.0, 1.0)
    first_per_square = alive if start is None else inverse_square(first_length)
    N = tl.zeros((LV, LK, W, RK, 1, 1), tl.float32)  # the gradient in the logarithm of the slots' lengths
    if d_end is None:
        L = tl.zeros((LV, LK, W, RK, GV, RV), tl.float32)
    else:
        L = load_state(d_end + at, slot, channel, K, V)
        if not NORMALIZE:
            some = stop > first
            end_length = load_four(lengths + ((stop - 1) * HV + head) * K, 0, slot, some, K, 3)
            L *= tl.where(some, end_length, 1.0)
    blocks = ((stop - first + EVERY - 1) // EVERY).to(tl.int32)
    for block in range(0, blocks):
        token = first + (blocks - 1 - block) * EVERY
        parts = (tl.minimum(stop - token, EVERY).to(tl.int32) + FEW - 1) // FEW
        # The interpreter runs float32, and does without.
        if q.dtype.element_ty.primitive_bitwidth == 16:  # noqa: SIM102 (one is known when compiling)
            if token > first:
                prefetch_rows(states, ((m + blocks - 2 - block) * HV + head) * K, K, 1, V, LK * W * RK)
                prefetch_block(
                    q, k, v, gamma, decay, do, kept, turned, along, answers, (token - EVERY) * HV + head,
                    step_address(token - EVERY, first, m, HV, head, K, BY_CHUNKS), HV, K, V, OBJECTIVE, BY_CHUNKS, HEADS_K,
                    HEADS_GAMMA, HEADS_DECAY,
                )  # fmt: skip
        S = load_state(states + ((m + blocks - 1 - block) * HV + head) * K * V, slot, channel, K, V)
        if BY_CHUNKS:
            find_steps_again(
                S, q, k, v, gamma, decay, do, kept, turned, along, scratch, token, first, stop, m, HV, head, slot, channel,
                stores_slots, first_per_square, alive, K, V, OBJECTIVE, HEADS_K, HEADS_GAMMA, HEADS_DECAY,
            )  # fmt: skip
        else:
            store_state(scratch, slot, channel, S, K, V)
            for part in range(1, parts):
                for i in range(0, FEW):
                    place = (token + (part - 1) * FEW + i) * HV + head
                    S = take_step(S, v, kept, turned, answers, place, place * K, slot, channel, K, V, OBJECTIVE, False)
                store_state(scratch + part * K * V, slot, channel, S, K, V)
        for part in range(0, parts):
            begin = token + (parts - 1 - part) * FEW
            few = tl.minimum(stop - begin, FEW).to(tl.int32)
            for back in range(0, few):
                before = few - 1 - back  # tokens from `begin` to this one
                t = begin + before
                place, step = t * HV + head, step_address(t, first, m, HV, head, K, BY_CHUNKS)
                query, key, grad_o, gain, d, b, length = load_rest(
                    q, k, gamma, decay, do, along, lengths, place, step, slot, channel, K, V, NORMALIZE, BY_CHUNKS,
                    HEADS_K, HEADS_GAMMA, HEADS_DECAY,
                )  # fmt: skip
                f, w, h = load_step(v, kept, turned, answers, place, step, slot, channel, K, V, OBJECTIVE, BY_CHUNKS)
                S = load_state(scratch + (parts - 1 - part) * K * V, slot, channel, K, V)
                for i in range(0, before):
                    S = take_step(
                        S, v, kept, turned, answers, (begin + i) * HV + head,
                        step_address(begin + i, first, m, HV, head, K, BY_CHUNKS), slot, channel, K, V, OBJECTIVE, BY_CHUNKS,
                    )  # fmt: skip
                d_query = f * sum_over_channels(S * grad_o) + w * sum_over_channels(h * grad_o)
                if NORMALIZE:
                    length = alive
                    per_square = tl.where(t == first, first_per_square, alive)
                else:
                    length_before = load_four(lengths + (place - HV) * K, 0, slot, t > first, K, 3)
                    per_square = tl.where(t == first, first_per_square, inverse_square(length_before))
                    d_query *= length
                read = query * d_query
                query *= length
                L, N, d_value, d_key, d_gain, d_decay = differentiate_turn(
                    L + query * grad_o, N, S, key, h, gain, d, f, w, b, length, per_square, t == stop - 1, read,
                    OBJECTIVE, NORMALIZE,
                )  # fmt: skip
                # Every warp writes its part of the sums over slots: the first lane for gamma, the second for decay.
                part_sum = sum_over_warp_slots(tl.where(lane == 0, d_gain, d_decay))
                tl.store(gate_parts + (2 * (thread // 32) + lane) * gates + place, part_sum, lane < 2)
                store_four(dq + place * K, 0, slot, d_query, stores_slots, K, 3)
                store_four(dk + place * K, 0, slot, d_key, stores_slots, K, 3)
                store_four(dv + place * V, 0, channel, d_value, stores_channels, V, 5)
    if d_start is not None:
        if blocks > 0:
            S, _ = load_first_slots(start, at, slot, channel, K, V)
            inverse_first_length = tl.where(first_length == 0, 0.0, 1.0 / first_length)
            L = inverse_first_length * (L + (N - sum_over_channels(L * S)) * S)
        store_state(d_start + at, slot, channel, L, K, V)
