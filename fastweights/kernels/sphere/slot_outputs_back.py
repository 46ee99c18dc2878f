"""The backward of a chunk's own outputs, in parallel over chunks: dq, and what of A and D comes from them.

L, the gradient in a slot, is followed by its products with what lies before, y_c = L h_c and z = L s_0, from the chunk's end
backwards: L <- f (L + q dO). Then D = y_t, and A follows from s_{t-1} = f_{t-1} (.. (f_1 s_0 + w_1 h_1) ..) + w_{t-1} h_{t-1}.
A thread owns a slot and has the tokens of a chunk in its registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
from .forward import EVERY, LEAST_DECAY, TILE, bound_below
from .slot_steps import block_place, inverse_squares, load_block_rows, load_slots, load_tokens, slot_exists, take_row
from .slot_turns import find_step


@triton.jit
def find_steps(
    k, gates, squares, first_per_square, decay, b, place, sequence_head, token, slot, count, is_first, HV: tl.constexpr,
    K: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """f and w of a chunk [16, TILE] from b; gates: see `store_gates`."""
    key = load_slots(k, place, token, slot, count, HV, K, HEADS_K).to(tl.float32)
    per_square = tl.load(first_per_square + sequence_head * K + slot, slot < K, 0.0)
    gain = tl.load(gates + token) * inverse_squares(per_square, token, is_first)
    d = 1.0 if decay is None else tl.load(gates + EVERY + token)
    f, w = find_step(key, gain, d, tl.load(squares + token), b, OBJECTIVE, dtype)
    return tl.where(token < count, f, 1.0), w


@triton.jit
def store_gates(
    gates, gamma, decay, place, count, HV: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr
):
    """gamma and decay of a chunk [2, 16] as its steps take them: four tokens are then one load."""
    token = tl.arange(0, EVERY)[None, :]
    tl.store(gates + token, to_float_or_nan(load_tokens(gamma, place, token, count, HV, HEADS_GAMMA, 0.0)))
    if decay is not None:
        d = to_float_or_nan(load_tokens(decay, place, token, count, HV, HEADS_DECAY, 1.0))
        tl.store(gates + EVERY + token, bound_below(d, LEAST_DECAY))


@triton.jit
def store_steps(x, values, in_head, part, K: tl.constexpr, WIDE: tl.constexpr):
    slot = part + tl.arange(0, WIDE)[:, None]
    tl.store(x + in_head * K * EVERY + slot * EVERY + tl.arange(0, EVERY)[None, :], tl.trans(values), slot < K)


@triton.jit
def compose_steps(f, x, y, next_f, next_x, next_y):
    """Of slots f s + x and f s + y that go through next_f s + next_x and next_f s + next_y."""
    return f * next_f, next_f * x + next_x, next_f * y + next_y


@triton.jit
def products_of_outputs(query, F, W, slot_do, reads, token):
    """A and D [16, TILE] of a chunk as far as they come from its own outputs, s_{t-1}.dO, and L.s_0 at its start [1, TILE]. The
    reductions rely on the order of the tokens, which Triton keeps inside a thread only: tests/kernels/test_machine_code.py looks
    at the layout."""
    A = tl.zeros_like(F)
    D, R, y, z = A, A, A, take_row(A, token, 0)
    for back in tl.static_range(EVERY):
        t = EVERY - 1 - back
        query_t, f, do_t = take_row(query, token, t), take_row(F, token, t), take_row(slot_do, token, t)
        read = tl.load(reads + t * EVERY + token)
        y += query_t * read
        z += query_t * do_t
        kept_part, L_part, do_part = tl.reduce(
            (
                tl.where(token < t, F, 1.0), tl.where(token < t, W * y, -0.0),
                tl.where(token < t, W * tl.broadcast_to(read, W.shape), -0.0),
            ), 0, compose_steps, keep_dims=True,
        )  # fmt: skip
        now = token == t
        A, D = tl.where(now, kept_part * z + L_part, A), tl.where(now, y, D)
        R = tl.where(now, kept_part * do_t + do_part, R)
        y *= f
        z *= f
    return A, D, R, z


@triton.jit(do_not_specialize=["T"])
def prepare_turns_back(
    q, k, v, gamma, decay, do, along, first_per_square, states, pairs, reads, gates, A, D, at_start, dq, blocks, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pairs [M, HV, 16, K + 16]: the products of a chunk's h with the slots at its start and with each other, but those of the
    first h, which nobody needs: their place holds the squares. reads [M, HV, 16, 16]: the products of its output gradients with
    its h. gates [M, HV, 2, 16]: see `store_gates`. A, D [M, HV, K, 16]: as far as they come from its own outputs.
    at_start [M, HV, K] or None: the product of the slots at its start with the gradient in them that comes from its outputs."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, n, is_first = block_place(blocks, m, T)
    if count > 0:
        place, in_head = first * HV + head, m * HV + head
        token, other = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
        channel = tl.arange(0, BV)[None, :]
        h = load_block_rows(v, first, count, head, HV, V, BV)
        grad_o = load_block_rows(do, first, count, head, HV, V, BV)
        reads += in_head * EVERY * EVERY
        gates += in_head * 2 * EVERY
        pairs += in_head * EVERY * (K + EVERY)
        in_pairs = pairs + token * (K + EVERY)
        tl.store(reads + token * EVERY + other, tl.dot(grad_o, tl.trans(h), input_precision=PRECISION))
        products = tl.dot(h, tl.trans(h), input_precision=PRECISION)
        squares = tl.sum(tl.where(token == other, products, 0.0), 0, keep_dims=True)
        tl.store(in_pairs + K + other, tl.where(token == 0, squares, products))
        store_gates(gates, gamma, decay, place, count, HV, HEADS_GAMMA, HEADS_DECAY)
        tl.debug_barrier()
        states += in_head * K * V
        for part in range(0, K, TILE):
            # A thread loads one slot, not neighbours at once, so that it gets all tokens of that slot.
            slot = part + tl.multiple_of(tl.arange(0, TILE)[None, :], [1, 1])
            state_row = part + tl.arange(0, TILE)[:, None]
            b = tl.trans(tl.load(along + in_head * K * EVERY + state_row * EVERY + other, state_row < K, 0.0))
            S = tl.load(states + state_row * V + channel, (state_row < K) & (channel < V), 0.0)
            slot_h = tl.trans(tl.dot(S, tl.trans(h), input_precision=PRECISION))
            slot_do = tl.trans(tl.dot(S, tl.trans(grad_o), input_precision=PRECISION))
            query = load_slots(q, place, token, slot, count, HV, K, HEADS_K).to(tl.float32)
            # The layout of what was loaded last, as in `turn_slots`.
            b = tl.where(token < EVERY, b, query)
            F, W = find_steps(
                k, gates, pairs + K, first_per_square, decay, b, place, n * HV + head, token, slot, count, is_first, HV, K,
                OBJECTIVE, HEADS_K, v.dtype.element_ty,
            )  # fmt: skip
            slot_do = tl.where(token < count, slot_do, query)
            tl.store(in_pairs + slot, tl.where(token < count, slot_h, 0.0 * query), slot < K)
            from_A, from_D, d_query, start_along = products_of_outputs(query, F, W, slot_do, reads, token)
            store_steps(A, from_A, in_head, part, K, TILE)
            store_steps(D, from_D, in_head, part, K, TILE)
            if at_start is not None:
                tl.store(at_start + in_head * K + slot, start_along, slot < K)
            d_query = F * d_query + W * tl.load(reads + token * (EVERY + 1))
            inside = slot_exists(token, slot, count, K)
            tl.store(dq + place * K + slot + token * (HV * K), d_query.to(dq.dtype.element_ty), inside)
