"""The recurrent kernel of output-normalised test-time training.

What a token writes depends on the length of the memory's whole answer, so one program owns the state [K, V] of a head.
"""

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
    """o [B, T, HV, V] of `output_normalized_ttt`."""
    o = call.new_output()
    launch_recurrent(decode_output_normalized_ttt, call, whole_state, (o,), inputs=INPUTS, states=("S",))
    return o


INPUTS = ("q", "k", "v", "gamma")
SHORTEST = tl.constexpr(1e-6)  # as in the op's reference


@triton.jit(**jit_options(INPUTS))
def decode_output_normalized_ttt(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    gamma, gamma_token, gamma_head, GAMMA_GROUP: tl.constexpr,
    o, S, new_S, S_step, S_head, state_indices, P, cu_seqlens, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`."""
    if state_indices is not None:
        wait_for_inputs(OVERLAP)
    _, _, n, head, index, held = program_head(state_indices, P, HV, ROWS)
    channel, column = tl.arange(0, BK), tl.arange(0, BV)
    is_channel, is_column = channel < K, column < V
    at_state, in_state, state = state_tile(S, index, S_step, head, S_head, held, channel, column, K, V)
    if state_indices is None:  # no kernel that may still run has written the state
        wait_for_inputs(OVERLAP)

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        # All loads come before any use, so that their latencies overlap.
        key = load_row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel)
        query = load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)
        value = load_row(v, token, v_token, head, v_head, V_GROUP, column, is_column)
        step = to_float_or_nan(load_number(gamma, token, gamma_token, head, gamma_head, GAMMA_GROUP))

        key, query, value = to_float_or_nan(key), to_float_or_nan(query), to_float_or_nan(value)
        z = tl.sum(state * key[:, None], 0)
        read = tl.sum(state * query[:, None], 0)
        square = tl.sum(z * z, 0)
        short = square < SHORTEST * SHORTEST  # no direction: the delta rule's step
        inverse = tl.rsqrt(tl.where(short, 1.0, square))
        along = tl.where(short, 1.0, tl.sum(z * value, 0) * inverse * inverse * inverse)
        written = step * (inverse * value - along * z)
        # S_t^T q = S^T q + (k . q) written: both sums over the state read S, none waits for the other.
        answer = read + tl.sum(key * query, 0) * written
        state += key[:, None] * written[None, :]
        tl.store(o + (token * HV + head) * V + column, tl.where(held, answer, 0.0), mask=is_column)
        if ROWS > 1:
            keep_state(new_S, at_state, in_state, state, index, S_step, state_indices, n, t, P, ROWS)

    if ROWS == 1:
        tl.store(new_S + at_state, state, mask=in_state, eviction_policy="evict_first")
