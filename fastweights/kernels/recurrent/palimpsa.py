"""The recurrent kernel of Palimpsa: the posterior is updated and read at once.

Nothing but the read-out's sum over key channels joins the elements, so a program owns a tile [K, BV] of M and J.
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
from .launching import (
    choose_columns,
    decay_from_log,
    jit_options,
    keep_state,
    launch_recurrent,
    load_number,
    load_row,
    program_head,
    state_tile,
)

# Columns of a program's tile and its warps, by the key channels (rounded up to a power of two): at most 32 numbers of each state
# per thread.
CHOICES = {64: (32, 2), 128: (32, 4), 256: (32, 8)}


def decode(call: RecurrentCall, *, with_variance: bool = False) -> Tensor | tuple[Tensor, ...]:
    """o [B, T, HV, V] of `palimpsa`, whose prior is a number or a tensor."""
    prior = call.inputs["prior"]
    given = isinstance(prior, Tensor)
    o, variance = call.new_output(), call.new_output() if with_variance else None
    launch_recurrent(
        decode_palimpsa, call, partial(choose_columns, choices=CHOICES), (o, variance), inputs=INPUTS, states=("M", "J"),
        parameters=(prior, prior.stride(0)) if given else (None, 0),
        numbers=(float(call.options["scale"]), 0.0 if given else float(prior)),
    )  # fmt: skip
    return o if variance is None else (o, variance)


def decode_posterior(call: RecurrentCall) -> Tensor | tuple[Tensor, ...]:
    """o and the variance of `palimpsa_posterior`, each [B, T, HV, V]."""
    return decode(call, with_variance=True)


INPUTS = ("q", "k", "v", "beta", "g")


@triton.jit(**jit_options(INPUTS, "prior", "variance", numbers=("prior_step",)))
def decode_palimpsa(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    beta, beta_token, beta_head, BETA_GROUP: tl.constexpr,
    g, g_token, g_head, G_GROUP: tl.constexpr,
    prior, prior_step, o, variance, M, new_M, M_step, M_head, J, new_J, J_step, J_head,
    state_indices, P, cu_seqlens, T, scale, one_prior,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`."""
    wait_for_inputs(OVERLAP)
    tile, place, n, head, index, held = program_head(state_indices, P, HV, ROWS, (V + BV - 1) // BV)
    channel, column = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    is_channel, is_column = channel < K, column < V

    at_M, in_state, mean = state_tile(M, index, M_step, head, M_head, held, channel, column, K, V)
    at_J, in_state, importance = state_tile(J, index, J_step, head, J_head, held, channel, column, K, V)
    p = one_prior if prior is None else tl.load(prior + head * prior_step).to(tl.float32)

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        # All loads come before any use, so that their latencies overlap.
        key = load_row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel)
        query = load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)
        written = load_row(v, token, v_token, head, v_head, V_GROUP, column, is_column)
        gain = load_row(beta, token, beta_token, head, beta_head, BETA_GROUP, column, is_column)
        decay = decay_from_log(load_number(g, token, g_token, head, g_head, G_GROUP))

        key, query = to_float_or_nan(key), to_float_or_nan(query) * scale
        written, gain = to_float_or_nan(written), to_float_or_nan(gain)
        mean = decay * mean + key[:, None] * written[None, :]
        importance = decay * importance + (key * key)[:, None] * gain[None, :]
        weights = query[:, None] / (importance + p)
        place_of_token = (token * HV + head) * V + column
        tl.store(o + place_of_token, tl.where(held, tl.sum(weights * mean, 0), 0.0), mask=is_column)
        if variance is not None:
            spread = tl.sum(weights * query[:, None], 0)
            tl.store(variance + place_of_token, tl.where(held, spread, 0.0), mask=is_column)
        if ROWS > 1:
            keep_state(new_M, at_M, in_state, mean, index, M_step, state_indices, n, t, P, ROWS)
            keep_state(new_J, at_J, in_state, importance, index, J_step, state_indices, n, t, P, ROWS)

    if ROWS == 1:
        tl.store(new_M + at_M, mean, mask=in_state, eviction_policy="evict_first")
        tl.store(new_J + at_J, importance, mask=in_state, eviction_policy="evict_first")
