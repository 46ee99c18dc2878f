"""The forward of the decode objective with slots of length 1: one program per sequence and head, token after token.

As `pass_tokens`, with these differences. Every lane computes the step of one slot (own_slots.py). Rounding changes the length of
a slot by about 1e-7 per token, so slots get their length back every 16 tokens only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import float_or_nan
from .forward import EVERY, LEAST_DECAY, TILE, edges, first_slots, not_below, prefetch_tokens, store_state
from .layout import both_over_slots, over_channels, over_slots, slot_and_channel
from .own_slots import dot_of, load_own, own_over_channels, own_slot, own_start, store_own, to_tile
from .slot_steps import inverse_root
from .words import load_four, store_four


@triton.jit
def raw_token(
    q, k, v, gamma, decay, place, here, slot, channel, own,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Key (of the slots of a tile and of the lane's own), query, value, gamma and decay of a token, as they are in memory."""
    in_head = place // HEADS_K * K
    gain = tl.load(gamma + place // HEADS_GAMMA, here, 0.0)
    return (
        load_four(k + in_head, 0, slot, here, K, 3),
        load_own(k + in_head, own, here, K),
        load_four(q + in_head, 0, slot, here, K, 3),
        load_four(v + place * V, 0, channel, here, V, 5),
        gain,
        gain if decay is None else tl.load(decay + place // HEADS_DECAY, here, 0.0),
    )


@triton.jit(do_not_specialize=["T"])
def decode_tokens(
    q, k, v, gamma, decay, start, o, kept, turned, along, answers, states, end, grown, cu_seqlens, T, HV,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr,
):  # fmt: skip
    """kept, turned, along [BT, HV, K]: f, w and b. answers [BT, HV, V]: h. states [M, HV, K, V]: every 16 tokens.
    grown: see `has_grown`; infinite where f is too small over 16 tokens for a backward to undo them."""
    n, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = q.dtype.element_ty
    # A backward divides by the product of f of up to 16 tokens; this much of a state's digits may get lost there.
    LEAST: tl.constexpr = 2.0**-4 if dtype == tl.float32 else 2.0**-10
    first, stop, m = edges(cu_seqlens, n, T)
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, GV, RV)
    own, copy = own_slot(LK, W)
    stores_channels = thread // LV == 0
    at = (n.to(tl.int64) * HV + head) * K * V
    S, length = first_slots(start, at, slot, channel, K, V)
    per_square, alive = own_start(start, length, own, K, V)
    place = first * HV + head
    lost = own < 0
    now = raw_token(
        q, k, v, gamma, decay, place, first < stop, slot, channel, own, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY
    )  # fmt: skip
    answer = over_slots(S * now[0].to(tl.float32))
    for block in range(first, stop, EVERY):
        store_state(states + (m * HV + head) * K * V, slot, channel, S, K, V)
        m += 1
        # The interpreter runs float32, and does without.
        if dtype != tl.float32:
            coming = tl.minimum(stop - block - EVERY, EVERY).to(tl.int32)
            if coming > 0:
                prefetch_tokens(
                    q, k, v, gamma, decay, (block + EVERY) * HV + head, coming, HV, K, V, HEADS_K, HEADS_GAMMA,
                    HEADS_DECAY,
                )  # fmt: skip
        product = tl.full((LV, LK, W), 1.0, tl.float32)
        for t in range(block, tl.minimum(block + EVERY, stop)):
            ahead = raw_token(
                q, k, v, gamma, decay, place + HV, t + 1 < stop, slot, channel, own, K, V, HEADS_K, HEADS_GAMMA,
                HEADS_DECAY,
            )  # fmt: skip
            # Infinities that get into the state come out of its sums as NaN; elsewhere they are made NaN.
            h = now[3].to(tl.float32) - answer
            b = own_over_channels(S * h)
            square = dot_of(h, h)
            gain = float_or_nan(now[4])
            a = gain * per_square * now[1].to(tl.float32)
            across = not_below(square - b * b, 0.0)
            if decay is None:
                inverse = inverse_root(1.0 + a * a * across, dtype)
                f = (1.0 - a * b) * inverse
            else:
                d = not_below(float_or_nan(now[5]), LEAST_DECAY)
                inverse = inverse_root(d * d + a * a * across, dtype)
                f = (d - a * b) * inverse
            w = a * inverse
            product *= f
            S = to_tile(f) * S + to_tile(w) * h
            out, answer = both_over_slots(S * float_or_nan(now[2]), S * ahead[0].to(tl.float32))
            store_own(kept + place * K, own, f, copy == 0, K)
            store_own(turned + place * K, own, w, copy == 0, K)
            store_own(along + place * K, own, b, copy == 0, K)
            store_four(answers + place * V, 0, channel, h, stores_channels, V, 5)
            store_four(o + place * V, 0, channel, out, stores_channels, V, 5)
            if start is not None:
                per_square = alive
            now = ahead
            place += HV
        lost = lost | ~(tl.abs(product) >= LEAST)  # or NaN
        square = over_channels(S * S)
        S *= tl.where(square == 0, 0.0, tl.rsqrt(square))
    most = tl.max(tl.max(tl.max(tl.where(lost, float("inf"), 0.0), 2), 1), 0)
    TILES: tl.constexpr = (K + TILE - 1) // TILE
    for part in tl.static_range(TILES):
        tl.store(grown + (n * HV + head) * TILES + part, most)
    if end is not None:
        store_state(end + at, slot, channel, S * tl.where(stop > first, tl.where(length == 0, 0.0, 1.0), length), K, V)
