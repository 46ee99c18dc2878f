"""The recurrent kernel of elementwise Longhorn. Nothing but the read-out joins the elements, so a program owns a tile [K, BV]."""

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
from .launching import choose_columns, jit_options, keep_state, launch_recurrent, load_row, program_head, state_tile


def decode(call: RecurrentCall) -> Tensor:
    """o [B, T, HV, V] of `elementwise_longhorn`."""
    o = call.new_output()
    launch_recurrent(
        decode_elementwise_longhorn, call, partial(choose_columns, choices=CHOICES), (o,), inputs=INPUTS, states=("S",),
        numbers=(float(call.options["scale"]),),
    )  # fmt: skip
    return o


INPUTS = ("q", "k", "v", "beta")


@triton.jit(**jit_options(INPUTS))
def decode_elementwise_longhorn(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    beta, beta_token, beta_head, BETA_GROUP: tl.constexpr,
    o, S, new_S, S_step, S_head, state_indices, P, cu_seqlens, T, scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`."""
    wait_for_inputs(OVERLAP)
    tile, place, n, head, index, held = program_head(state_indices, P, HV, ROWS, (V + BV - 1) // BV)
    channel, column = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    is_channel, is_column = channel < K, column < V
    at_state, in_state, state = state_tile(S, index, S_step, head, S_head, held, channel, column, K, V)

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        # All loads come before any use, so that their latencies overlap.
        key = load_row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel)
        query = load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)
        value = load_row(v, token, v_token, head, v_head, V_GROUP, column, is_column)
        beta_V = load_row(beta, token, beta_token, head, beta_head, BETA_GROUP, column, is_column)

        key, query, value = to_float_or_nan(key), to_float_or_nan(query) * scale, to_float_or_nan(value)
        beta_V = to_float_or_nan(beta_V)
        gain = beta_V / (1 + beta_V * tl.sum(key * key, 0))
        state += (key[:, None] * gain[None, :]) * (value[None, :] - key[:, None] * state)
        tl.store(
            o + (token * HV + head) * V + column, tl.where(held, tl.sum(state * query[:, None], 0), 0.0), mask=is_column
        )
        if ROWS > 1:
            keep_state(new_S, at_state, in_state, state, index, S_step, state_indices, n, t, P, ROWS)

    if ROWS == 1:
        tl.store(new_S + at_state, state, mask=in_state, eviction_policy="evict_first")
