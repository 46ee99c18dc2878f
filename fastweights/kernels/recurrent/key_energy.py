"""The recurrent kernel of the diagonal preconditioners: the energy A of the key channels is updated, and a query is divided by it
or a key becomes a write key. A head has as many numbers as channels, so a program owns all of them."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import to_float_or_nan
from ..common.overlap import wait_for_inputs
from ..common.packing import tokens_of_sequence
from . import RecurrentCall
from .launching import (
    Tile,
    decay_from_log,
    jit_options,
    keep_state,
    launch_recurrent,
    load_number,
    load_row,
    program_head,
)


def decode_queries(call: RecurrentCall) -> Tensor:
    """q~ [B, T, HV, K] of `precondition_queries`, whose ridge is a number or a tensor."""
    ridge = call.inputs["ridge"]
    given = isinstance(ridge, Tensor)
    parameters = (ridge, *ridge.stride()) if given else (None, 0, 0)
    return precondition(call, parameters, (0.0, 0.0, 0.0 if given else float(ridge)), form="queries")


def decode_keys(call: RecurrentCall) -> Tensor:
    """w [B, T, HV, K] of `precondition_keys`."""
    center, options = call.inputs["center"], call.options
    numbers = (math.log(options["bound"]), float(options["eps"]), float(options["ridge"]))
    return precondition(call, (center, center.stride(0), 0), numbers, form=options["squash"])


def precondition(
    call: RecurrentCall, parameters: tuple[Tensor | None, int, int], numbers: tuple[float, ...], form: str
) -> Tensor:
    k, heads = call.inputs["k"], call.states["A"].shape[1]
    answer = k.new_empty(*k.shape[:2], heads, k.shape[3])
    launch_recurrent(
        decode_key_energy, call, whole_head, (answer,), inputs=INPUTS, states=("A",), parameters=parameters, numbers=numbers,
        FORM=form,
    )  # fmt: skip
    return answer


def whole_head(key: int, _: int) -> Tile:
    return Tile(padded(key, 1), 0, 1)


INPUTS = ("q", "k", "g", "beta")


@triton.jit(**jit_options(INPUTS, "parameter", numbers=("parameter_head", "parameter_channel")))
def decode_key_energy(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    g, g_token, g_head, G_GROUP: tl.constexpr,
    beta, beta_token, beta_head, BETA_GROUP: tl.constexpr,
    parameter, parameter_head, parameter_channel, o, A, new_A, A_step, A_head,
    state_indices, P, cu_seqlens, T, log_bound, eps, ridge,
    FORM: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """FORM: "queries", or the squash of the write keys. parameter: the ridge of queries, else the centre; x, x_token, x_head,
    X_GROUP: see `strides`."""
    wait_for_inputs(OVERLAP)
    _, _, n, head, index, held = program_head(state_indices, P, HV, ROWS)
    channel = tl.arange(0, BK)
    is_channel = channel < K
    at = index * A_step + head * A_head + channel
    energy = tl.load(A + at, mask=is_channel & held, other=0)
    if parameter is not None:
        middle = tl.load(parameter + head * parameter_head + channel * parameter_channel, mask=is_channel, other=1)
        middle = middle.to(tl.float32)

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        key = to_float_or_nan(load_row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel))
        decay = decay_from_log(load_number(g, token, g_token, head, g_head, G_GROUP))
        gain = to_float_or_nan(load_number(beta, token, beta_token, head, beta_head, BETA_GROUP))
        before = energy
        energy = decay * energy + gain * key * key
        if FORM == "queries":
            query = to_float_or_nan(load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel))
            answer = query / (energy + (ridge if parameter is None else middle))
        elif FORM == "none":
            # A NaN of a gate reaches its own token, as in PyTorch.
            direction = key / (before + ridge) + 0 * decay * gain
            answer = direction / (1 + tl.sum(direction * key, 0))
        else:
            distance = tl.log(energy + eps) - middle
            squashed = tanh(distance) if FORM == "tanh" else distance / (1 + tl.abs(distance))
            answer = tl.exp(-log_bound * squashed) * key
        tl.store(o + (token * HV + head) * K + channel, tl.where(held, answer, 0.0), mask=is_channel)
        if ROWS > 1:
            keep_state(new_A, at, is_channel & held, energy, index, A_step, state_indices, n, t, P, ROWS)

    if ROWS == 1:
        tl.store(new_A + at, energy, mask=is_channel & held)


@triton.jit
def tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)
