"""The recurrent kernel of linear attention and the delta rules.

With one token per sequence the state is nearly all the traffic, so a program owns a tile [K, BV] of the state and does the rest
in registers. Programs of one head share only the preconditioner's A, which each of them computes.
"""

from __future__ import annotations

import math
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from ..common.delta_rule.steps import in_order
from ..common.math import to_float_or_nan
from ..common.overlap import wait_for_inputs
from ..common.packing import tokens_of_sequence
from . import RecurrentCall
from .launching import (
    PlacedState,
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
    values_lie_first,
)

# Columns of a program's tile and its warps, by the key channels (rounded up to a power of two): rows of 128 bytes, at most 64
# numbers of the state per thread.
CHOICES = {64: (32, 1), 128: (32, 2), 256: (32, 4)}


def decode(call: RecurrentCall, steps: int = 1) -> Tensor:
    """o [B, T, HV, V] of `delta_rule`, of `linear_attention` where no beta is given, of `preconditioned_delta_rule` where A is
    a state. The write key is k unless given or made by the preconditioner. With several steps per token k, v, beta and the write
    key are [B, T steps, ...]."""
    x, options, v = call.inputs, call.options, call.inputs["v"]
    g, center = x.get("g"), x.get("center")
    tile = partial(choose_columns, choices=CHOICES)
    A, read, written = None, None, None
    if "A" in call.states:
        A = PlacedState(call, "A")
        read, written = A.source, A.target
        if call.state_indices is not None:
            read = call.take_read(read)
        elif written is read and tile(x["k"].shape[3], v.shape[3]).columns < v.shape[3]:
            # The programs of a head's other tiles may read A after the first tile's program has written it.
            read = read.clone()
        read = read.contiguous()
    o = v.new_empty(v.shape[0], v.shape[1] // steps, *v.shape[2:])
    launch_recurrent(
        decode_delta_rule, call, tile, (o,), inputs=INPUTS, states=("S",),
        parameters=(None, 0, 1) if center is None else (center, center.stride(0), v.shape[2] // len(center)),
        more=(read, written, *((0, 0) if written is None else written.stride()[:2])),
        numbers=(float(options["scale"]), math.log(options.get("bound", 1.0)), float(options.get("eps", 0.0))),
        G_CHANNELS=g is not None and g.ndim == 4, VALUE_FIRST=values_lie_first(call, "S"), STEPS=steps,
    )  # fmt: skip
    if A is not None:
        A.finish()
    return o


def decode_steps(call: RecurrentCall) -> Tensor:
    """o [B, T, HV, V] of `delta_product`."""
    stepped = {name: in_order(call.inputs.get(name)) for name in ("k", "v", "beta", "write_key")}
    return decode(call._replace(inputs={**call.inputs, **stepped}), call.inputs["k"].shape[3])


INPUTS = ("q", "k", "v", "write_key", "beta", "g", "precond_g", "precond_beta")
SHORT = ("q", "k", "v", "w", "beta", "g", "pg", "pb")  # in the kernel


@triton.jit(**jit_options(SHORT, "center", numbers=("center_step", "A_step", "A_head")))
def decode_delta_rule(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    w, w_token, w_head, W_GROUP: tl.constexpr,
    beta, beta_token, beta_head, BETA_GROUP: tl.constexpr,
    g, g_token, g_head, G_GROUP: tl.constexpr,
    pg, pg_token, pg_head, PG_GROUP: tl.constexpr,
    pb, pb_token, pb_head, PB_GROUP: tl.constexpr,
    center, center_step, CENTER_GROUP: tl.constexpr,
    o, S, new_S, S_step, S_head, A, new_A, A_step, A_head,
    state_indices, P, cu_seqlens, T, scale, log_bound, eps,
    G_CHANNELS: tl.constexpr, VALUE_FIRST: tl.constexpr, STEPS: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`; w: write keys; pg, pb: the preconditioner's g and beta; A: one row per
    sequence, new_A: with strides, which may be a pool. STEPS: of a token, each with its k, v, beta and w; the memory decays at
    the first, and q reads it after the last."""
    channel = tl.arange(0, BK)
    if OVERLAP and state_indices is None and not VALUE_FIRST:
        fetch_state(S, S_step, S_head, channel, P, HV, K, V, BV)
    wait_for_inputs(OVERLAP)
    tile, place, n, head, index, held = program_head(state_indices, P, HV, ROWS, (V + BV - 1) // BV)
    column = tile * BV + tl.arange(0, BV)
    is_channel, is_column = channel < K, column < V

    at_state, in_state, state = state_tile(S, index, S_step, head, S_head, held, channel, column, K, V, VALUE_FIRST)
    if A is not None:
        gram = tl.load(A + place.to(tl.int64) * K + channel, mask=is_channel, other=0)
        c = tl.load(center + head // CENTER_GROUP * center_step).to(tl.float32)

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        for step in tl.static_range(STEPS):
            # All loads come before any use, so that their latencies overlap.
            row = token * STEPS + step
            key = load_row(k, row, k_token, head, k_head, K_GROUP, channel, is_channel)
            query = load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)
            written = load_row(v, row, v_token, head, v_head, V_GROUP, column, is_column)
            if G_CHANNELS:
                decay = load_row(g, token, g_token, head, g_head, G_GROUP, channel, is_channel)
            elif g is not None:
                decay = load_number(g, token, g_token, head, g_head, G_GROUP)
            if beta is not None:
                gain = load_number(beta, row, beta_token, head, beta_head, BETA_GROUP)
            if A is not None:
                A_decay = load_number(pg, token, pg_token, head, pg_head, PG_GROUP)
                A_gain = load_number(pb, token, pb_token, head, pb_head, PB_GROUP)
            if w is not None:
                write_key = load_row(w, row, w_token, head, w_head, W_GROUP, channel, is_channel)

            key, query, written = to_float_or_nan(key), to_float_or_nan(query) * scale, to_float_or_nan(written)
            if w is not None:
                write_key = to_float_or_nan(write_key)
            elif A is not None:
                gram = decay_from_log(A_decay) * gram + to_float_or_nan(A_gain) * key * key
                distance = tl.log(gram + eps) - c
                write_key = tl.exp(-log_bound * distance / (1 + tl.abs(distance))) * key
            else:
                write_key = key
            if g is not None and step == 0:
                state *= decay_from_log(decay)[:, None] if G_CHANNELS else decay_from_log(decay)
            if beta is not None:
                written = to_float_or_nan(gain) * (written - tl.sum(state * key[:, None], 0))
            if step == STEPS - 1:
                # S_t^T q = S'^T q + (w . q) u: both sums over the state read S', none waits for the other.
                answer = tl.sum(state * query[:, None], 0) + tl.sum(write_key * query, 0) * written
                tl.store(o + (token * HV + head) * V + column, tl.where(held, answer, 0.0), mask=is_column)
            state += write_key[:, None] * written[None, :]
        if ROWS > 1:
            keep_state(new_S, at_state, in_state, state, index, S_step, state_indices, n, t, P, ROWS)
            if A is not None and tile == 0:
                at_A, in_A = index * A_step + head * A_head + channel, is_channel & held
                keep_state(new_A, at_A, in_A, gram, index, A_step, state_indices, n, t, P, ROWS)

    if ROWS == 1:
        tl.store(new_S + at_state, state, mask=in_state, eviction_policy="evict_first")
        if A is not None and tile == 0:
            tl.store(new_A + index * A_step + head * A_head + channel, gram, mask=is_channel & held)
