"""The recurrent kernel of the delta rule with a transition of a diagonal plus any matrix of rank one (RWKV-7's memory).

A program owns a tile [K, BV] of the state, as in the delta rule. It needs no second step and no quotient by the decay, as the
chunk kernels do: the row a reads the memory before it decays.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from ..common.math import to_float_or_nan
from ..common.overlap import wait_for_inputs
from ..common.packing import tokens_of_sequence
from . import RecurrentCall
from .delta_rule import CHOICES
from .launching import (
    choose_columns,
    decay_from_log,
    fetch_state,
    jit_options,
    keep_state,
    launch_recurrent,
    load_number,
    load_row,
    program_head,
    state_tile,
)


def decode(call: RecurrentCall) -> Tensor:
    """o [B, T, HV, V] of `dplr_delta_rule`."""
    o, g = call.new_output(), call.inputs.get("g")
    launch_recurrent(
        decode_dplr_delta_rule, call, partial(choose_columns, choices=CHOICES), (o,), inputs=INPUTS, states=("S",),
        numbers=(float(call.options["scale"]),), G_CHANNELS=g is not None and g.ndim == 4,
    )  # fmt: skip
    return o


INPUTS = ("q", "k", "v", "a", "b", "g")


@triton.jit(**jit_options(INPUTS))
def decode_dplr_delta_rule(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    a, a_token, a_head, A_GROUP: tl.constexpr,
    b, b_token, b_head, B_GROUP: tl.constexpr,
    g, g_token, g_head, G_GROUP: tl.constexpr,
    o, S, new_S, S_step, S_head, state_indices, P, cu_seqlens, T, scale,
    G_CHANNELS: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`."""
    channel = tl.arange(0, BK)
    if OVERLAP and state_indices is None:
        fetch_state(S, S_step, S_head, channel, P, HV, K, V, BV)
    wait_for_inputs(OVERLAP)
    tile, place, n, head, index, held = program_head(state_indices, P, HV, ROWS, (V + BV - 1) // BV)
    column = tile * BV + tl.arange(0, BV)
    is_channel, is_column = channel < K, column < V
    at_state, in_state, state = state_tile(S, index, S_step, head, S_head, held, channel, column, K, V)

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        # All loads come before any use, so that their latencies overlap.
        key = load_row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel)
        query = load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)
        read = load_row(a, token, a_token, head, a_head, A_GROUP, channel, is_channel)
        along = load_row(b, token, b_token, head, b_head, B_GROUP, channel, is_channel)
        value = load_row(v, token, v_token, head, v_head, V_GROUP, column, is_column)
        if G_CHANNELS:
            decay = load_row(g, token, g_token, head, g_head, G_GROUP, channel, is_channel)
        elif g is not None:
            decay = load_number(g, token, g_token, head, g_head, G_GROUP)

        key, query, value = to_float_or_nan(key), to_float_or_nan(query) * scale, to_float_or_nan(value)
        read, along = to_float_or_nan(read), to_float_or_nan(along)
        erased = tl.sum(state * read[:, None], 0)
        if g is not None:
            state *= decay_from_log(decay)[:, None] if G_CHANNELS else decay_from_log(decay)
        state += along[:, None] * erased[None, :] + key[:, None] * value[None, :]
        answer = tl.sum(state * query[:, None], 0)
        tl.store(o + (token * HV + head) * V + column, tl.where(held, answer, 0.0), mask=is_column)
        if ROWS > 1:
            keep_state(new_S, at_state, in_state, state, index, S_step, state_indices, n, t, P, ROWS)

    if ROWS == 1:
        tl.store(new_S + at_state, state, mask=in_state, eviction_policy="evict_first")
