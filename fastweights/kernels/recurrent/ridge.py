"""The recurrent kernels of Gated KalmaNet and mesa: one solves a head's system, the one of linear attention asks the memory. For
one token of few heads the first one also asks the memory, which it has loaded before.

A matrix H [K, K] stays in the registers of a program through all iterations, each one product of H with a vector. It is held as
[L, K, J, E], column j L E + l E + e of J L E = K: Triton then spreads L over neighbouring lanes and the rows over the other lanes
and the warps. A sum over columns takes two exchanges between lanes, and the vector goes through shared memory once per iteration.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import to_float_or_nan
from ..common.overlap import wait_for_inputs
from ..common.packing import tokens_of_sequence
from . import RecurrentCall, delta_rule
from .launching import (
    Tile,
    decay_from_log,
    jit_options,
    keep_state,
    launch_recurrent,
    load_number,
    load_row,
    program_head,
    state_tile,
    values_lie_first,
)

MOST_JOINED = 128  # heads, each of which has a multiprocessor's registers for both of its states
WIDEST_JOINED = 128 * 128  # numbers of U in these registers


def decode(call: RecurrentCall) -> Tensor:
    """o [B, T, HV, V] of `gated_kalmanet`, or of `mesa` where the ridge is a tensor."""
    x, options = call.inputs, call.options
    ridge, beta, v = x.get("ridge"), x.get("beta"), x["v"]
    joined = joins_memory(call)
    asked, writes, solving = call.new_output(), None, call
    if not joined:
        asked = v.new_empty(*v.shape[:3], x["k"].shape[3], dtype=call.states["H"].dtype)
        writes = None if beta is None else torch.empty_like(asked)
        solving = call._replace(states={"H": call.states["H"]})
    launch_recurrent(
        decode_systems, solving, whole_registers if joined else whole_matrix, (asked, writes), inputs=INPUTS,
        states=("H", "U"), parameters=(ridge, 0 if ridge is None else ridge.stride(0)),
        numbers=(options.get("ridge", 0.0), options["iterations"], options["scale"]),
        CHEBYSHEV=options.get("solver") == "chebyshev", ADAPTIVE=options.get("adaptive_ridge", False),
        V=v.shape[3], BV=padded(v.shape[3], 1),
    )  # fmt: skip
    if joined:
        return asked
    memory = {"q": asked, "k": x["k"], "v": v, "g": x["g"], "write_key": writes}
    finals = None if call.new_states is None else {"S": call.new_states["U"]}
    return delta_rule.decode(
        call._replace(inputs=memory, states={"S": call.states["U"]}, options={"scale": 1.0}, new_states=finals)
    )


def joins_memory(call: RecurrentCall) -> bool:
    """Whether the launch that solves the systems also asks the memory."""
    _, time, heads, value = call.inputs["v"].shape
    few = (
        call.sequences * heads <= MOST_JOINED
        and padded(call.inputs["k"].shape[3], 1) * padded(value, 1) <= WIDEST_JOINED
    )
    plain = time == 1 and call.cu_seqlens is None and call.rows_per_sequence == 1
    return few and plain and not values_lie_first(call, "U")


def whole_matrix(key: int, _: int) -> Tile:
    """All of H, on up to eight warps: an iteration is as long as its sums take to cross them. Two programs have room on a
    multiprocessor."""
    rows = padded(key, 1)
    return Tile(rows, 0, max(1, min(8, rows * rows // 1024)), registers=128)


def whole_registers(key: int, value: int) -> Tile:
    """The same for a program that also holds U."""
    return whole_matrix(key, value)._replace(registers=None)


INPUTS = ("q", "k", "g", "beta", "mix", "v")
SMALLEST_RIDGE = tl.constexpr(1e-6)  # this and the next two as in the op's system.py and iterations.py
SMALLEST_NORM = tl.constexpr(1e-15)
TINY = tl.constexpr(1.1754943508222875e-38)
TRUSTED = tl.constexpr(1e-3)  # share of a sum that a difference must be to have digits


@triton.jit
def frobenius_norm(H):
    """|H|_F, without overflow of the squares."""
    largest = tl.max(max_over_columns(tl.abs(H)), 0)
    H *= 1 / tl.where(largest > 0, largest, 1.0)
    return largest * tl.sqrt(tl.sum(sum_over_columns(H * H), 0))


@triton.jit
def sum_over_columns(H):
    """The sum of every row, in a thread first."""
    return tl.sum(tl.sum(tl.sum(H, 2), 2), 0)


@triton.jit
def max_over_columns(H):
    return tl.max(tl.max(tl.max(H, 2), 2), 0)


@triton.jit
def lay_along_columns(x, L: tl.constexpr, J: tl.constexpr, E: tl.constexpr):
    """A vector [K] as it stands beside the columns."""
    return tl.permute(tl.reshape(x, (J, 1, L, E)), (2, 1, 0, 3))


@triton.jit
def transpose_matrix(H):
    """The transpose."""
    L: tl.constexpr = H.shape[0]
    K: tl.constexpr = H.shape[1]
    J: tl.constexpr = H.shape[2]
    E: tl.constexpr = H.shape[3]
    whole = tl.reshape(tl.permute(H, (1, 2, 0, 3)), (K, K))
    return tl.permute(tl.reshape(tl.trans(whole), (K, J, L, E)), (2, 0, 1, 3))


@triton.jit
def multiply(H, x):
    return sum_over_columns(H * lay_along_columns(x, H.shape[0], H.shape[2], H.shape[3]))


@triton.jit
def chebyshev(H, b, low, high, iterations):
    """The iteration for eigenvalues of H + low I in [low, high]."""
    contraction = (high - low) / (high + low)
    step = 2 / (high + low)
    omega = 2.0
    x = step * b
    before = tl.zeros_like(x)
    for _ in range(iterations):
        omega = 4 / (4 - contraction * contraction * omega)
        residual = multiply(H, x) + low * x - b
        x, before = before + omega * (x - before - step * residual), x
    return x


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def conjugate_gradient(H, b, ridge, iterations, enough):
    """From zero, until the residual is `enough` of b. What is solved already stays as it is.

    An iteration takes one sum across the warps: the square of the next residual r - step A d is step^2 |A d|^2 - |r|^2, because
    r.A d = d.A d. It says how the next direction lies, and where it is more than rounding also whether the system is solved.
    |r|^2 itself is summed anew in the next iteration.
    """
    size = tl.maximum(tl.max(tl.abs(b), 0), TINY)
    residual = b * (1 / size)
    direction = residual
    x = tl.zeros_like(residual)
    least = enough * enough * tl.sum(residual * residual, 0)
    while iterations > 0:
        image = multiply(H, direction) + ridge * direction
        energy, overlap, square = tl.reduce((residual * residual, direction * image, image * image), 0, add_three)
        step = energy / tl.maximum(tl.abs(overlap), TINY)  # negative only by rounding
        x += step * direction
        residual -= step * image
        left = tl.maximum(step * step * square - energy, 0.0)
        direction = residual + left / tl.maximum(energy, TINY) * direction
        is_solved = (energy <= least) | ((left <= least) & (left > TRUSTED * energy))
        iterations = tl.where(is_solved, 0, iterations - 1)
    return size * x


@triton.jit(**jit_options(INPUTS, "ridge", "asked", "writes", numbers=("ridge_head", "iterations")))
def decode_systems(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    g, g_token, g_head, G_GROUP: tl.constexpr,
    beta, beta_token, beta_head, BETA_GROUP: tl.constexpr,
    mix, mix_token, mix_head, MIX_GROUP: tl.constexpr,
    v, v_token, v_head, V_GROUP: tl.constexpr,
    ridge, ridge_head, asked, writes, H, new_H, H_step, H_head, U, new_U, U_step, U_head,
    state_indices, P, cu_seqlens, T, level, iterations, scale,
    CHEBYSHEV: tl.constexpr, ADAPTIVE: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`. asked, writes [BT, HV, K]: what the memory is asked, and beta k; with U, which
    is that of one token, asked [BT, HV, V] are the answers. ridge [HV, K], or None: `level`, times |H|_F if ADAPTIVE."""
    EARLY: tl.constexpr = U is not None and state_indices is None  # no kernel that may still run has written the states
    if not EARLY:
        wait_for_inputs(OVERLAP)
    _, _, n, head, index, held = program_head(state_indices, P, HV, ROWS)
    channel = tl.arange(0, BK)
    is_channel = channel < K
    E: tl.constexpr = 4 if BK >= 4 else BK
    L: tl.constexpr = 4 if BK >= 16 else BK // E
    J: tl.constexpr = BK // (E * L)
    column = tl.arange(0, L)[:, None, None, None] * E + tl.arange(0, J)[None, None, :, None] * (L * E)
    column += tl.arange(0, E)[None, None, None, :]
    at_H = index * H_step + head * H_head + (channel[None, :, None, None] * K + column)
    in_H = (channel < K)[None, :, None, None] & (column < K) & held
    state = tl.load(H + at_H, in_H, 0.0, eviction_policy="evict_first")
    if U is not None:  # on its way while H is transposed
        row, column_U = tl.arange(0, BK), tl.arange(0, BV)
        at_U, in_U, memory = state_tile(U, index, U_step, head, U_head, held, row, column_U, K, V)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    state = tl.where(count > 0, 0.5 * (state + transpose_matrix(state)), state)  # without a token it stays as it is
    enough: tl.constexpr = 2.0**-26 if q.dtype.element_ty == tl.float32 else 2.0**-13  # as in the chunk kernels
    diagonal = level
    if EARLY:
        wait_for_inputs(OVERLAP)
    if ridge is not None:
        diagonal = tl.load(ridge + head * ridge_head + channel, mask=is_channel, other=1.0).to(tl.float32)

    for t in range(count):
        token = first + t
        # All loads come before any use, so that their latencies overlap.
        key = load_row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel)
        query = load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)
        decay = decay_from_log(load_number(g, token, g_token, head, g_head, G_GROUP))
        gain = 1.0
        if beta is not None:
            gain = to_float_or_nan(load_number(beta, token, beta_token, head, beta_head, BETA_GROUP))
        if mix is not None:
            part = to_float_or_nan(load_number(mix, token, mix_token, head, mix_head, MIX_GROUP))
        if U is not None:
            value = load_row(v, token, v_token, head, v_head, V_GROUP, column_U, column_U < V)

        key, query = to_float_or_nan(key), to_float_or_nan(query) * scale
        state = decay * state + (gain * key)[None, :, None, None] * lay_along_columns(key, L, J, E)
        at = (token * HV + head) * K + channel
        if writes is not None:
            tl.store(writes + at, gain * key, mask=is_channel)
        if U is not None:
            # Nothing waits for the stores while the system is solved.
            value = to_float_or_nan(value)
            memory = decay * memory + (gain * key)[:, None] * value[None, :]
            tl.store(new_U + at_U, memory, mask=in_U, eviction_policy="evict_first")
            tl.store(new_H + at_H, state, mask=in_H, eviction_policy="evict_first")
        norm = frobenius_norm(state)
        if CHEBYSHEV:
            bound = tl.maximum(norm, SMALLEST_NORM)
            low = tl.maximum(level * bound, SMALLEST_RIDGE) if ADAPTIVE else level
            x = chebyshev(state, query, low, low + bound, iterations)
        elif ADAPTIVE:
            x = conjugate_gradient(state, query, tl.maximum(level * norm, SMALLEST_RIDGE), iterations, enough)
        else:
            x = conjugate_gradient(state, query, diagonal, iterations, enough)
        if mix is not None:
            x = query + part * (x - query)
        if U is None:
            tl.store(asked + at, x, mask=is_channel)
        else:
            answer = tl.sum(memory * to_float_or_nan(x)[:, None], 0)
            tl.store(asked + (token * HV + head) * V + column_U, tl.where(held, answer, 0.0), mask=column_U < V)
        if ROWS > 1:
            keep_state(new_H, at_H, in_H, state, index, H_step, state_indices, n, t, P, ROWS)

    if U is None and ROWS == 1:
        tl.store(new_H + at_H, state, mask=in_H, eviction_policy="evict_first")
