"""The gradients of the steps of slots, in parallel over chunks: see __init__.py for those of one token.

With A = L s and D = L h of a token (L: the gradient in a slot after it, s: the slot before it) the gradient of b is linear in
both, x = A_weight A + D_weight D, and L <- f L + x h. A and D of all tokens come from slot_outputs_back.py and
slot_turns_back.py. Every number of a slot and token is found in the layout of slot_outputs.py, in which it goes into matrix
products as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import EVERY, TILE
from .slot_outputs import join_across_borders, load_operand, make_operand, operand_tile
from .slot_steps import block_place, find_step_again, inverse_squares, load_block_rows


@triton.jit
def sum_over_tile_slots(x):
    """The sum of such a tile over slots [2, 1, 1, 8, 1]."""
    return tl.sum(tl.sum(tl.sum(x, 1, keep_dims=True), 2, keep_dims=True), 4, keep_dims=True)


@triton.jit
def first_token_numbers(x, token):
    """The first token's numbers of such a tile [TILE, 1]."""
    found = tl.sum(tl.sum(tl.where(token == 0, x, 0.0), 0, keep_dims=True), 3, keep_dims=True)
    return tl.reshape(tl.permute(found, (0, 3, 1, 4, 2)), (TILE, 1))


@triton.jit(do_not_specialize=["T", "gates"])
def slot_gradients(
    k, v, gamma, decay, do, along, states, first_per_square, pairs, scores, A, D, adjoints,
    dk, dv, gate_parts, gates, d_start, blocks, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk but dq. gate_parts [PARTS, 2, BT, HV]: those of gamma and decay in the first part, 0 in the
    others."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, n, is_first = block_place(blocks, m, T)
    if count > 0:
        dtype: tl.constexpr = v.dtype.element_ty
        place, in_head = first * HV + head, m * HV + head
        t, c = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
        channel = tl.arange(0, BV)[None, :]
        token, first_slots = operand_tile(0)
        pairs += in_head * EVERY * (K + EVERY)
        square = tl.load(pairs + K + token)
        gamma_t = tl.load(gamma + place // HEADS_GAMMA + token * (HV // HEADS_GAMMA), token < count, 0.0)
        d_t = None
        if decay is not None:
            d_t = tl.load(decay + place // HEADS_DECAY + token * (HV // HEADS_DECAY), token < count, 1.0)
        turns = tl.zeros((EVERY, EVERY), tl.float32)
        dh = tl.zeros((EVERY, BV), tl.float32)
        d_gain = tl.zeros((2, 1, 1, 8, 1), tl.float32)
        d_decay, h_weight = d_gain, d_gain
        for part in range(0, K, TILE):
            slot = part + first_slots
            in_steps, there = in_head * K * EVERY, slot < K
            b = load_operand(along + in_steps, token, slot, 1, EVERY, there, 0.0)
            A_t = load_operand(A + in_steps, token, slot, 1, EVERY, there, 0.0)
            D_t = load_operand(D + in_steps, token, slot, 1, EVERY, there, 0.0)
            inside = (token < count) & there
            key = load_operand(k + place // HEADS_K * K, token, slot, HV // HEADS_K * K, 1, inside, 0.0)
            # 0, which the compiler does not see: it would leave no sum to call contiguous.
            per_token = tl.where(count < 0, 1, 0)
            per_square = load_operand(
                first_per_square + (n * HV + head) * K, token, slot, per_token, 1, there & (token < EVERY), 0.0
            )
            per_square = inverse_squares(per_square, token, is_first)
            F, W, error, gain, d, inverse, across, A_weight, D_weight = find_step_again(
                key, gamma_t, d_t, b, per_square, square, OBJECTIVE, dtype
            )
            x = A_weight * A_t + D_weight * D_t
            E = F * A_t + W * D_t
            da = (D_t - b * A_t) * inverse - across * E
            # As in `load_operand`, for the layout.
            at = tl.multiple_of(tl.max_contiguous(slot + token * (HV * K), [1, 1, 1, 2, 4]), [1, 1, 1, 1, 1])
            tl.store(dk + place * K + at, (gain * da).to(dk.dtype.element_ty), inside)
            d_gain += sum_over_tile_slots(error * per_square * da)
            h_weight -= sum_over_tile_slots(W * W * E)
            if decay is not None:
                d_decay += sum_over_tile_slots(W * (across * A_t + inverse * inverse * d * (b * A_t - D_t)))
            state_row = part + tl.arange(0, TILE)[:, None]
            in_state = in_head * K * V + state_row * V + channel
            in_tile = (state_row < K) & (channel < V)
            S = tl.load(states + in_state, in_tile, 0.0)
            if d_start is not None:  # noqa: SIM102 (one is known when compiling)
                if is_first:
                    # L is the gradient in the slots of length 1; their length n changes the first step.
                    at_start = (n * HV + head) * K * V + state_row * V + channel
                    gradient = tl.load(d_start + at_start, in_tile, 0.0)
                    gradient += first_token_numbers(-2 * gain * error * da, token) * S
                    gradient *= tl.sqrt(first_token_numbers(tl.broadcast_to(per_square, F.shape), token))
                    tl.store(d_start + at_start, gradient, in_tile)
            turns, after, before = join_across_borders(turns, x, W, F, token, dtype, PRECISION)
            dh = tl.dot(make_operand(after.to(dtype)), S.to(dtype), dh, input_precision=PRECISION)
            L = tl.load(adjoints + in_state, in_tile, 0.0)
            dh = tl.dot(make_operand(before.to(dtype)), L.to(dtype), dh, input_precision=PRECISION)
        both = turns.to(dtype)
        h = load_block_rows(v, first, count, head, HV, V, BV)
        grad_o = load_block_rows(do, first, count, head, HV, V, BV)
        dh = tl.dot(both, h, dh, input_precision=PRECISION)
        dh = tl.dot(tl.trans(both), h, dh, input_precision=PRECISION)
        scores += in_head * EVERY * EVERY
        dh = tl.dot(tl.trans(tl.load(scores + t * EVERY + c)), grad_o, dh, input_precision=PRECISION)
        dh += tl.reshape(h_weight, (EVERY, 1)) * h.to(tl.float32)
        tl.store(dv + place * V + channel + t * (HV * V), dh.to(dv.dtype.element_ty), (t < count) & (channel < V))
        gate = gate_parts + place + token * HV
        tl.store(gate, d_gain, token < count)
        tl.store(gate + gates, d_decay, token < count)
        for part in tl.static_range(1, PARTS):
            tl.store(gate + 2 * part * gates, tl.zeros_like(d_gain), token < count)
            tl.store(gate + (2 * part + 1) * gates, tl.zeros_like(d_gain), token < count)
