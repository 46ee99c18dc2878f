"""The recurrent kernel of Lattice: one program owns all slots of a head, because the answers sum over slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.math import to_float_or_nan
from ..common.overlap import wait_for_inputs
from ..common.packing import tokens_of_sequence
from . import RecurrentCall
from .launching import (
    jit_options,
    keep_state,
    launch_recurrent,
    load_number,
    load_row,
    program_head,
    state_tile,
    whole_state,
)


def decode(call: RecurrentCall) -> Tensor:
    """o [B, T, HV, V] of `lattice`."""
    o, options = call.new_output(), call.options
    launch_recurrent(
        decode_lattice, call, whole_state, (o,), inputs=INPUTS, states=("S",), numbers=(float(options["l1"]),),
        OBJECTIVE=options["objective"], NORMALIZE=options["normalize"], L1=options["l1"] > 0,
    )  # fmt: skip
    return o


INPUTS = ("q", "k", "v", "gamma", "decay")
SHORTEST = tl.constexpr(1e-6)  # as in the op's slots.py
RESOLUTION = tl.constexpr(2.0**-23)  # a smaller decay counts as this


@triton.jit
def inverse_and_length(S):
    """1 / length and length of the slots [K, V]; both 0 where there is nothing."""
    square = tl.sum(S * S, 1)
    inverse = tl.rsqrt(tl.where(square == 0, float("inf"), square))
    length = square * inverse
    return inverse, tl.where((length > 0) & (length < SHORTEST), SHORTEST, length)


@triton.jit
def shrink(S, pull):
    """Every number pulled towards 0 by `pull`, not beyond; NaN stays NaN."""
    left = tl.abs(S) - pull
    left = tl.where(left < 0, 0.0, left)
    return tl.where(S > 0, left, tl.where(S < 0, -left, S))


@triton.jit(**jit_options(INPUTS))
def decode_lattice(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    gamma, gamma_token, gamma_head, GAMMA_GROUP: tl.constexpr,
    decay, decay_token, decay_head, DECAY_GROUP: tl.constexpr,
    o, S, new_S, S_step, S_head, state_indices, P, cu_seqlens, T, l1,
    OBJECTIVE: tl.constexpr, NORMALIZE: tl.constexpr, L1: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`."""
    if state_indices is not None:
        wait_for_inputs(OVERLAP)
    _, _, n, head, index, held = program_head(state_indices, P, HV, ROWS)
    slot, column = tl.arange(0, BK), tl.arange(0, BV)
    is_slot, is_column = slot < K, column < V
    at_state, in_state, state = state_tile(S, index, S_step, head, S_head, held, slot, column, K, V)
    if state_indices is None:  # no kernel that may still run has written the state
        wait_for_inputs(OVERLAP)

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        # Loads come before any use, so that their latencies overlap.
        key = load_row(k, token, k_token, head, k_head, K_GROUP, slot, is_slot)
        value = load_row(v, token, v_token, head, v_head, V_GROUP, column, is_column)
        step = to_float_or_nan(load_number(gamma, token, gamma_token, head, gamma_head, GAMMA_GROUP))
        kept = 1.0
        if decay is not None:
            kept = to_float_or_nan(load_number(decay, token, decay_token, head, decay_head, DECAY_GROUP))
            kept = tl.where(kept < RESOLUTION, RESOLUTION, kept)

        key, value = to_float_or_nan(key), to_float_or_nan(value)
        inverse, length = inverse_and_length(state)
        state *= inverse[:, None]
        # With h and c of the rule both turned over where that saves a sign, a step takes in c h.
        write = key
        if OBJECTIVE == "decode":
            value -= tl.sum(state * key[:, None], 0)
        along = tl.sum(state * value[None, :], 1)
        if OBJECTIVE == "encode":
            write = key - along
        query = load_row(q, token, q_token, head, q_head, Q_GROUP, slot, is_slot)  # not before: registers
        write *= step / tl.where(length == 0, float("inf"), length)
        state = (kept * length - write * along)[:, None] * state + write[:, None] * value[None, :]
        if L1:
            state = shrink(state, step * l1)
        inverse, length = inverse_and_length(state)
        state *= (inverse if NORMALIZE else inverse * length)[:, None]
        answer = tl.sum(state * to_float_or_nan(query)[:, None], 0)
        tl.store(o + (token * HV + head) * V + column, tl.where(held, answer, 0.0), mask=is_column)
        if ROWS > 1:
            keep_state(new_S, at_state, in_state, state, index, S_step, state_indices, n, t, P, ROWS)

    if ROWS == 1:
        tl.store(new_S + at_state, state, mask=in_state, eviction_policy="evict_first")
