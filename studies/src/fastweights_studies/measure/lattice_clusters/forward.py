"""The forward of Lattice's decode objective with slots of length 1, a head on several multiprocessors, in Gluon for Hopper GPUs.

The steps are those of `decode_tokens` in fastweights/kernels/sphere/decode_steps.py. The channels of a head are spread over a
cluster of programs, so that sums over channels cross the cluster, once per token (exchanges.py). Tokens go in pairs: the next
pair is loaded while this one is computed. Where the number of tokens is odd, a token that changes nothing completes the pair.
"""

from __future__ import annotations

from fastweights.kernels.common.math import to_float_or_nan
from fastweights.kernels.runtime.gluon import gl, gluon
from fastweights.kernels.sphere.decode_steps import MOST
from fastweights.kernels.sphere.forward import EVERY, LEAST_DECAY, SHORTEST, bound_below, find_edges, inverse_square
from fastweights.kernels.sphere.slot_steps import inverse_root

from .exchanges import (
    begin_exchanges,
    beside_channels,
    beside_slots,
    end_exchanges,
    receive_one,
    send_one,
    state_layout,
    sum_over_lanes,
)


@gluon.jit
def find_places(K: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr):
    """Where the numbers of a thread belong: slot, warp of the cluster, lane and row of the lane, which broadcast to
    [32, K / 32, G]; channel and lane, which broadcast to [32, G, channels]; and places in a state [32, K / 32, G, channels]."""
    SLOTS: gl.constexpr = K // 32
    G: gl.constexpr = SLOTS * PARTS
    CHANNELS: gl.constexpr = V // G
    STATE: gl.constexpr = state_layout(K, CHANNELS, PARTS)
    BY_SLOT: gl.constexpr = gl.SliceLayout(3, STATE)
    BY_CHANNEL: gl.constexpr = gl.SliceLayout(1, STATE)
    lane = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, BY_SLOT)))[:, None, None]
    row = gl.arange(0, SLOTS, gl.SliceLayout(0, gl.SliceLayout(2, BY_SLOT)))[None, :, None]
    warp = gl.arange(0, G, gl.SliceLayout(0, gl.SliceLayout(1, BY_SLOT)))[None, None, :]
    slot = lane * SLOTS + row + warp * 0
    channel_lane = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, BY_CHANNEL)))[:, None, None]
    channel_warp = gl.arange(0, G, gl.SliceLayout(0, gl.SliceLayout(2, BY_CHANNEL)))[None, :, None]
    each = gl.arange(0, CHANNELS, gl.SliceLayout(0, gl.SliceLayout(1, BY_CHANNEL)))[None, None, :]
    channel = channel_warp * CHANNELS + each + channel_lane * 0
    in_state = slot[:, :, :, None] * V + channel[:, None, :, :]
    return slot, warp, lane, row, channel, channel_lane, in_state


@gluon.jit
def load_slots(start, at, slot, channel, in_state):
    """The initial slots as they are given; rows of the identity where none are."""
    if start is None:
        S = gl.where(slot[:, :, :, None] == channel[:, None, :, :], 1.0, 0.0)
    else:
        S = to_float_or_nan(gl.load(start + at + in_state))
    return S


@gluon.jit
def root_and_length(square):
    """1 / |s| and |s| of slots from |s|^2, both 0 for slots of zeros."""
    unit = gl.where(square == 0, 0.0, gl.rsqrt(square))
    length = square * unit
    return unit, gl.where((length < SHORTEST) & (square > 0), SHORTEST, length)


@gluon.jit
def load_token(
    k, v, gamma, decay, t, stop, head, slot, channel, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    HEADS_K: gl.constexpr, HEADS_GAMMA: gl.constexpr, HEADS_DECAY: gl.constexpr,
):  # fmt: skip
    """Key, value, gamma and decay of a token, as they are in memory."""
    here, place = t < stop, t * HV + head
    key = gl.load(k + place // HEADS_K * K + slot, here & (slot >= 0), 0.0)
    value = gl.load(v + place * V + channel, here & (channel >= 0), 0.0)
    gain = gl.load(gamma + place // HEADS_GAMMA, here, 0.0)
    d = gain
    if decay is not None:
        d = gl.load(decay + place // HEADS_DECAY, here, 1.0)
    return key, value, gain, d


@gluon.jit(do_not_specialize=["T"])
def decode_on_cluster(
    k, v, gamma, decay, start, kept, turned, along, answers, states, end, steep, cu_seqlens, T,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS_K: gl.constexpr, HEADS_GAMMA: gl.constexpr,
    HEADS_DECAY: gl.constexpr, PARTS: gl.constexpr, MBARRIER: gl.constexpr,
):  # fmt: skip
    """Arguments are those of `decode_tokens`; steep [M, HV]."""
    dtype: gl.constexpr = k.dtype.element_ty
    LEAST: gl.constexpr = 2.0**-10
    G: gl.constexpr = K // 32 * PARTS
    n, head = gl.program_id(0), gl.program_id(1)
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot, warp, lane, row, channel, channel_lane, in_state = find_places(K, V, PARTS)
    at = (n.to(gl.int64) * HV + head) * K * V
    area = begin_exchanges(K, PARTS, 1, 0)
    number = 0
    S = load_slots(start, at, slot, channel, in_state)
    ones = gl.to_tensor(1.0) + slot * 0.0
    length, alive, per_square = ones, ones, ones
    if start is not None:
        square = gl.sum(S * S, 3)
        send_one(area, number, square, square, PARTS, MBARRIER)
        square, _ = receive_one(area, number, square, PARTS, MBARRIER)
        number += 1
        unit, length = root_and_length(square)
        S *= unit[:, :, :, None]
        per_square = inverse_square(length)
        alive = gl.where(per_square > 0, 1.0, 0.0)
    now = load_token(k, v, gamma, decay, first, stop, head, slot, channel, HV, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY)
    after = load_token(
        k, v, gamma, decay, first + 1, stop, head, slot, channel, HV, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY
    )  # fmt: skip
    answer = sum_over_lanes(gl.sum(S * now[0].to(gl.float32)[:, :, :, None], 1))
    for block in range(first, stop, EVERY):
        gl.store(states + (m * HV + head) * K * V + in_state, S)
        least, most = ones, ones  # of |f .. f| from any token of the block on to its last
        for pair in range(0, (gl.minimum(stop - block, EVERY).to(gl.int32) + 1) // 2):
            for i in gl.static_range(2):
                t = block + 2 * pair + i
                h = now[1].to(gl.float32) - answer
                squares = beside_slots(gl.sum(h * h, 2), slot)
                along_h = gl.sum(S * h[:, None, :, :], 3)
                send_one(area, number, along_h, squares + slot * 0.0, PARTS, MBARRIER)
                here, place = t < stop, t * HV + head
                gl.store(answers + place * V + channel, h, here & (channel_lane == 0))
                a = to_float_or_nan(now[2]) * per_square * now[0].to(gl.float32)
                d = now[2] * 0 + 1.0
                if decay is not None:
                    d = bound_below(to_float_or_nan(now[3]), LEAST_DECAY)
                now, after = after, load_token(
                    k, v, gamma, decay, t + 2, stop, head, slot, channel, HV, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY
                )  # fmt: skip
                b, square = receive_one(area, number, along_h, PARTS, MBARRIER)
                number += 1
                inverse = inverse_root(d * d + a * a * bound_below(square - b * b, 0.0), dtype)
                f, w = (d - a * b) * inverse, a * inverse
                # The next answer comes from the state before the token, so that it need not wait for the update.
                key = now[0].to(gl.float32)
                shared = beside_channels(gl.sum(w * key, 1), channel)
                answer = sum_over_lanes(gl.sum(S * (f * key)[:, :, :, None], 1) + shared * h)
                S = f[:, :, :, None] * S + w[:, :, :, None] * h[:, None, :, :]
                least = gl.abs(f) * gl.where(least > 1, 1.0, least)
                most = gl.abs(f) * gl.where(most < 1, 1.0, most)
                gl.store(kept + place * K + slot, f, here & (warp == 0))
                gl.store(turned + place * K + slot, w, here & (warp == G // 2))
                gl.store(along + place * K + slot, b, here & (warp == 1))
                if start is not None:
                    per_square = alive
        lost = gl.where((least >= LEAST) & (most <= MOST), 0, 1)  # 1 for NaN
        lost = gl.max(gl.max(lost, 1), 0)
        gl.store(steep + m * HV + head + lost * 0, lost)
        square = gl.sum(S * S, 3)
        send_one(area, number, square, square, PARTS, MBARRIER)
        square, _ = receive_one(area, number, square, PARTS, MBARRIER)
        number += 1
        S *= root_and_length(square)[0][:, :, :, None]
        m += 1
    if end is not None:
        length = gl.where(stop > first, gl.where(length == 0, 0.0, 1.0), length)
        gl.store(end + at + in_state, S * length[:, :, :, None])
    end_exchanges()
