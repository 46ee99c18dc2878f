"""The backward of the decode objective with slots of length 1: as `pass_tokens_back`, with the step of one slot per lane.

A token is undone, s <- (s - w h) / f, so that the state stays in registers. Every block of 16 tokens begins with the kept state
at its end. In a block where f is so small that rounding errors would grow, every state is found from the one at its start.

The factors f of a block are kept apart: s = scale S, and the gradient in a slot is L / scale, so that scale <- scale / f undoes a
token in both. Where nothing is undone, scale is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import reciprocal, to_float_or_nan
from .forward import EVERY, LEAST_DECAY, bound_below, find_edges, load_first_slots, load_state, store_state
from .layout import slot_and_channel, sum_over_channels, sum_over_slots
from .own_slots import (
    dot_over_channels,
    load_own,
    load_own_start,
    own_slot,
    spread_to_tile,
    store_own,
    sum_over_four_slots,
    sum_own_over_channels,
)
from .slot_steps import inverse_root
from .words import load_four, prefetch_rows, store_four


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
            of_b = spread_to_tile(-w * (A + f * E) * scale, RK)  # the gradient of b, and what lies along the slot
            along_h = tl.reshape(sum_over_four_slots(w * w * E), (LV, LK, W, 1, 1, 1))
            dh = sum_over_slots(
                tl.sum(w_tile * L, 3, keep_dims=True) + tl.sum(of_b * S, 3, keep_dims=True) - along_h * h
            )
            if is_steep:
                L *= spread_to_tile(f, RK)
            else:
                inverse_scale *= f
            L += of_b * h
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
            per_length = tl.where(length == 0, 0.0, 1.0 / length)
            L = per_length * (L + (spread_to_tile(first_gradient, RK) - sum_over_channels(L * S)) * S)
        store_state(d_start + at, slot, channel, L, K, V)
