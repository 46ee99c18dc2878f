"""The backward of forward.py, from the last token to the first.

The steps are those of `decode_tokens_back`. The gradients of queries and keys are sums over channels too, but no step waits for
them: they are sent with the sums of the next token, each to the one program that stores it.
"""

from __future__ import annotations

from fastweights.kernels.common.math import prefetch, reciprocal, to_float_or_nan
from fastweights.kernels.runtime.gluon import gl, gluon
from fastweights.kernels.sphere.forward import EVERY, LEAST_DECAY, bound_below, find_edges, inverse_square
from fastweights.kernels.sphere.slot_steps import inverse_root

from .exchanges import (
    begin_exchanges,
    beside_channels,
    beside_slots,
    end_exchanges,
    receive_two,
    send_two,
    sum_over_lanes,
)
from .forward import find_places, load_slots, root_and_length


@gluon.jit
def load_step(
    kept, turned, answers, t, first, stop, head, slot, channel, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr
):
    """f, w and h of a token; 1, 0 and 0, which change nothing, where there is no token."""
    here, place = (t >= first) & (t < stop), t * HV + head
    f = gl.load(kept + place * K + slot, here & (slot >= 0), 1.0)
    w = gl.load(turned + place * K + slot, here & (slot >= 0), 0.0)
    return f, w, gl.load(answers + place * V + channel, here & (channel >= 0), 0.0)


@gluon.jit
def prefetch_rows(rows):
    prefetch(rows.to(gl.int64, bitcast=True))


@gluon.jit
def replay_on_cluster(
    states, kept, turned, answers, block, count, first, stop, head, slot, channel, in_state, HV: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """The state after `count` tokens of a block from the one kept at its start."""
    S = gl.load(states + in_state)
    for i in range(0, count):
        f, w, h = load_step(kept, turned, answers, block + i, first, stop, head, slot, channel, HV, K, V)
        S = f[:, :, :, None] * S + w[:, :, :, None] * h[:, None, :, :]
    return S


@gluon.jit
def load_rest(
    q, k, gamma, decay, do, along, t, first, stop, head, slot, channel, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    HEADS_K: gl.constexpr, HEADS_GAMMA: gl.constexpr, HEADS_DECAY: gl.constexpr,
):  # fmt: skip
    """Query, key, b, gradient of the output, gamma and decay of a token, as they are in memory."""
    here, place = (t >= first) & (t < stop), t * HV + head
    at, slots = place // HEADS_K * K + slot, here & (slot >= 0)
    query, key = gl.load(q + at, slots, 0.0), gl.load(k + at, slots, 0.0)
    b = gl.load(along + place * K + slot, slots, 0.0)
    grad_o = gl.load(do + place * V + channel, here & (channel >= 0), 0.0)
    gain = gl.load(gamma + place // HEADS_GAMMA, here, 0.0)
    d = gain
    if decay is not None:
        d = gl.load(decay + place // HEADS_DECAY, here, 1.0)
    return query, key, b, grad_o, gain, d


@gluon.jit
def sum_gates_over_slots(gain, d):
    """The sums of two numbers per slot [32, K / 32, G] over all slots [32, 1, G], in all lanes."""
    gain_sum, d_sum = gl.split(sum_over_lanes(gl.join(gl.sum(gain, 1), gl.sum(d, 1))))
    return beside_slots(gain_sum, gain), beside_slots(d_sum, gain)


@gluon.jit(do_not_specialize=["T", "gates"])
def decode_back_on_cluster(
    q, k, gamma, decay, start, do, d_end, kept, turned, along, answers, states, dq, dk, dv, gate_parts, gates, d_start, steep,
    cu_seqlens, T, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS_K: gl.constexpr, HEADS_GAMMA: gl.constexpr,
    HEADS_DECAY: gl.constexpr, PARTS: gl.constexpr, MBARRIER: gl.constexpr,
):  # fmt: skip
    """Arguments are those of `decode_tokens_back`; gate_parts [1, 2, BT, HV], steep [M, HV]."""
    dtype: gl.constexpr = k.dtype.element_ty
    WARPS: gl.constexpr = K // 32
    WIDTH: gl.constexpr = K // PARTS  # slots whose gradients of q and k a program writes
    n, head = gl.program_id(0), gl.program_id(1)
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot, warp, lane, row, channel, channel_lane, in_state = find_places(K, V, PARTS)
    at = (n.to(gl.int64) * HV + head) * K * V
    thread = warp % WARPS * 32 + lane + row * 0
    kind, own_slot = thread // WIDTH, warp // WARPS * WIDTH + thread % WIDTH
    area = begin_exchanges(K, PARTS, 2, 2)
    number = 0
    zeros = slot * 0.0
    alive, first_per_square = zeros + 1.0, zeros + 1.0
    if start is not None:
        S = load_slots(start, at, slot, channel, in_state)
        square = gl.sum(S * S, 3)
        send_two(area, number, square, zeros, zeros, zeros, zeros, PARTS, MBARRIER)
        square, _1, _2, _3 = receive_two(area, number, zeros, PARTS, MBARRIER)
        number += 1
        first_per_square = inverse_square(root_and_length(square)[1])
        alive = gl.where(first_per_square > 0, 1.0, 0.0)
    L = in_state.to(gl.float32) * 0.0
    if d_end is not None:
        L = gl.load(d_end + at + in_state).to(gl.float32)
    first_gradient, d_key = zeros, zeros
    blocks = ((stop - first + EVERY - 1) // EVERY).to(gl.int32)
    begin = first + (blocks - 1) * EVERY  # of the last block
    count = (stop - begin).to(gl.int32)
    in_head = (m + blocks - 1) * HV + head
    S = L
    t = stop
    if blocks > 0:
        S = replay_on_cluster(
            states + in_head * K * V, kept, turned, answers, begin, count, first, stop, head, slot, channel, in_state, HV, K, V
        )  # fmt: skip
        t = begin + (count + 1) // 2 * 2 - 1
    step = load_step(kept, turned, answers, t, first, stop, head, slot, channel, HV, K, V)
    rest = load_rest(
        q, k, gamma, decay, do, along, t, first, stop, head, slot, channel, HV, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY
    )  # fmt: skip
    for _ in range(0, blocks):
        is_steep = gl.load(steep + in_head) != 0
        prefetch_rows(states + in_head * K * V + slot * V + warp * (V // (WARPS * PARTS)))
        # Computed here, as Triton does not carry a variable to which a loop's body assigns a constant.
        for _ in range(0, (gl.minimum(stop - begin, EVERY).to(gl.int32) + 1) // 2):
            for _ in gl.static_range(2):
                f, w, h = step
                here, place = t < stop, t * HV + head
                query, key = to_float_or_nan(rest[0]), to_float_or_nan(rest[1])
                b, grad_o, gain = rest[2], rest[3].to(gl.float32), to_float_or_nan(rest[4])
                d = gain * 0 + 1
                if decay is not None:
                    d = bound_below(to_float_or_nan(rest[5]), LEAST_DECAY)
                step = load_step(kept, turned, answers, t - 1, first, stop, head, slot, channel, HV, K, V)
                rest = load_rest(
                    q, k, gamma, decay, do, along, t - 1, first, stop, head, slot, channel, HV, K, V, HEADS_K, HEADS_GAMMA,
                    HEADS_DECAY,
                )  # fmt: skip
                d_query = gl.sum(S * grad_o[:, None, :, :], 3)
                L += query[:, :, :, None] * grad_o[:, None, :, :]
                D = gl.sum(L * h[:, None, :, :], 3)
                if is_steep:
                    S = replay_on_cluster(
                        states + in_head * K * V, kept, turned, answers, begin, (t - begin).to(gl.int32), first, stop, head,
                        slot, channel, in_state, HV, K, V,
                    )  # fmt: skip
                else:
                    inverse_f = reciprocal(f, "tf32")
                    S = inverse_f[:, :, :, None] * S - (w * inverse_f)[:, :, :, None] * h[:, None, :, :]
                A = gl.sum(L * S, 3)
                squares = beside_slots(gl.sum(h * h, 2), slot)
                send_two(area, number, A, D, d_query, d_key, squares + zeros, PARTS, MBARRIER)
                # This does not need the sums, so it stands between sending and waiting.
                from_L = gl.sum(w[:, :, :, None] * L, 1)
                L *= f[:, :, :, None]
                per_square = alive
                if start is not None:
                    per_square = gl.where(t == first, first_per_square, alive)
                scaled = gain * per_square
                a = scaled * key
                A, D, square, own = receive_two(area, number, zeros, PARTS, MBARRIER)
                number += 1
                # The part of L along the slots after the token changes nothing, and would grow: it is taken out.
                E = f * A + w * D
                A -= E * (f + w * b)
                D -= E * (f * b + w * square)
                grad_b = -w * (A + f * E)  # the gradient of b, and what lies along the slot
                along_h = beside_channels(gl.sum(w * w * E, 1), channel)
                dh = sum_over_lanes(from_L + gl.sum(grad_b[:, :, :, None] * S, 1) - along_h * h)
                L += grad_b[:, :, :, None] * h[:, None, :, :] - (f * f * E)[:, :, :, None] * S
                L -= key[:, :, :, None] * dh[:, None, :, :]
                across = bound_below(square - b * b, 0.0)
                inverse = inverse_root(d * d + a * a * across, dtype)
                da = (D - b * A) * inverse
                d_decay = w * inverse * (across * w * A + inverse * d * (b * A - D))
                d_gain, d_decay = sum_gates_over_slots(key * per_square * da, d_decay)
                first_gradient = -2 * a * da
                # The first term does not depend on channels: one warp adds it.
                d_key = gl.where(warp == 0, scaled * da, 0.0) - gl.sum(S * dh[:, None, :, :], 3)
                gl.store(dq + place * K + own_slot, own.to(dtype), here & (row == 0) & (kind == 0))
                gl.store(dk + (place + HV) * K + own_slot, own.to(dtype), (t + 1 < stop) & (row == 0) & (kind == 1))
                gl.store(dv + place * V + channel, dh.to(dtype), here & (channel_lane == 0))
                one = here & (lane == 0) & (row == 0)
                gl.store(gate_parts + place + zeros.to(gl.int32), d_gain + zeros, one & (warp == 1))
                gl.store(gate_parts + gates + place + zeros.to(gl.int32), d_decay + zeros, one & (warp == 2))
                t -= 1
        S = gl.load(states + in_head * K * V + in_state)
        in_head -= HV
        begin -= EVERY
    # The gradient of the first key, and the part of the state's gradient that lies along the initial slots.
    S = load_slots(start, at, slot, channel, in_state)
    send_two(area, number, gl.sum(L * S, 3), gl.sum(S * S, 3), zeros, d_key, zeros, PARTS, MBARRIER)
    along_start, square, _, own = receive_two(area, number, zeros, PARTS, MBARRIER)
    gl.store(dk + (first * HV + head) * K + own_slot, own.to(dtype), (blocks > 0) & (row == 0) & (kind == 1))
    if d_start is not None:
        if blocks > 0:
            length = root_and_length(square)[1]
            inverse_length = gl.where(length == 0, 0.0, 1.0 / length)
            turned_part = (first_gradient - along_start * inverse_length) * inverse_length
            L = inverse_length[:, :, :, None] * (L + turned_part[:, :, :, None] * S)
        gl.store(d_start + at + in_state, L)
    end_exchanges()
