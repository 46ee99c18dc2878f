"""The forward of the decode objective with slots of length 1: one program per sequence and head, token after token.

As `pass_tokens`, with these differences. Every lane computes the step of one slot (own_slots.py). The factors f of up to four
tokens are kept apart, s = scale S, so that a token takes one operation per number of the state: S <- S + w h / scale. Rounding
changes the length of a slot by about 1e-7 per token, so slots get their length back every 16 tokens only. Outputs come from
slot_outputs.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import reciprocal, to_float_or_nan
from .forward import EVERY, FEW, LEAST_DECAY, bound_below, find_edges, load_first_slots, prefetch_tokens, store_state
from .layout import slot_and_channel, sum_over_channels, sum_over_slots
from .own_slots import (
    dot_over_channels,
    load_own,
    load_own_start,
    own_slot,
    spread_to_tile,
    store_own,
    sum_own_over_channels,
)
from .slot_steps import inverse_root
from .words import load_four, store_four

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
