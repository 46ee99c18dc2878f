"""The recurrent kernels of recursive least squares and variational linear attention.

One kernel updates the inverse Gram matrix and writes what the delta rule's kernel then takes: write keys, and for variational
linear attention unit keys and divided queries. So either matrix is read and written once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import to_float_or_nan
from ..common.overlap import wait_for_inputs
from ..common.packing import tokens_of_sequence
from . import RecurrentCall, delta_rule
from .launching import Tile, jit_options, keep_state, launch_recurrent, load_number, load_row, program_head, state_tile


def decode_least_squares(call: RecurrentCall) -> Tensor:
    """o [B, T, HV, V] of `recursive_least_squares` without decay."""
    made = find_directions(call, "P", {"k": call.inputs["k"], "u": call.inputs["k"], "beta": call.inputs["beta"]})
    return ask_delta_rule(call, {"beta": call.inputs["beta"], **made}, call.options["scale"])


def decode_variational(call: RecurrentCall) -> Tensor:
    """o [B, T, HV, V] of `variational_linear_attention`, also of its ablations that keep u."""
    x, options = call.inputs, call.options
    made = find_directions(
        call, "A", {"k": x["k"], "u": x["u"], "q": x["q"]},
        every=options["refresh_every"] or 0, refresh=float(options["refresh"]), eps=float(options["eps"]),
        UNIT_KEYS=options.get("normalize_keys", True), UNIT_WRITES=options.get("normalize_writes", True),
    )  # fmt: skip
    return ask_delta_rule(call, made, 1.0)


def ask_delta_rule(call: RecurrentCall, made: dict[str, Tensor], scale: float) -> Tensor:
    new = None if call.new_states is None else {"S": call.new_states["S"]}
    inner = call._replace(
        inputs={**{name: call.inputs[name] for name in ("q", "k", "v")}, **made}, states={"S": call.states["S"]},
        options={"scale": scale}, new_states=new,
    )  # fmt: skip
    return delta_rule.decode(inner)


def find_directions(
    call: RecurrentCall, matrix: str, inputs: dict[str, Tensor], every: int = 0, refresh: float = 0.0, eps: float = 0.0,
    UNIT_KEYS: bool = True, UNIT_WRITES: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """The delta rule's write keys, and where q is given its k, q and beta; the matrix, z and the count are updated."""
    sizes, key = call.inputs["v"].shape[:3], call.inputs["k"].shape[3]
    shapes = {"write_key": (*sizes, key)}
    if "q" in inputs:
        shapes |= {"k": (*sizes, key), "q": (*sizes, key), "beta": (*sizes,)}
    made = {name: torch.empty(shape, dtype=torch.float32, device=inputs["k"].device) for name, shape in shapes.items()}
    counts: tuple[Any, ...] = (None, None, 0)
    if "count" in call.states:
        seen = call.states["count"]
        if call.rows_per_sequence > 1:
            counts = (call.take_read(seen), seen, seen.stride(0))
        elif call.new_states is None:
            counts = (seen, None, seen.stride(0))
        else:
            new_seen = call.new_states["count"]
            counts = (seen.contiguous(), new_seen, new_seen.stride(0))
    launch_recurrent(
        decode_inverse_gram, call._replace(inputs=inputs), partial(whole_inverse, kept=call.rows_per_sequence > 1),
        [made.get(name) for name in ("write_key", "k", "q", "beta")], inputs=INPUTS, states=(matrix, "z"), more=counts,
        numbers=(every, refresh, eps), UNIT_KEYS=UNIT_KEYS, UNIT_WRITES=UNIT_WRITES,
    )  # fmt: skip
    return made


def whole_inverse(key: int, _: int, kept: bool) -> Tile:
    """All of the matrix; with eight warps so few registers that a multiprocessor runs two programs, where the matrix is not kept
    after each token."""
    rows = padded(key, 1)
    warps = max(1, rows * rows // 2048)
    return Tile(rows, 0, warps, registers=128 if warps == 8 and not kept else None)


INPUTS = ("q", "k", "u", "beta")
OTHERS = ("write_key", "read_key", "query", "gain", "seen", "new_seen")


@triton.jit(**jit_options(INPUTS, *OTHERS, numbers=("every", "z_step", "z_head", "seen_step")))
def decode_inverse_gram(
    q, q_token, q_head, Q_GROUP: tl.constexpr,
    k, k_token, k_head, K_GROUP: tl.constexpr,
    u, u_token, u_head, U_GROUP: tl.constexpr,
    beta, beta_token, beta_head, BETA_GROUP: tl.constexpr,
    write_key, read_key, query, gain, A, new_A, A_step, A_head, z, new_z, z_step, z_head, seen, new_seen, seen_step,
    state_indices, P, cu_seqlens, T, every, refresh, eps,
    UNIT_KEYS: tl.constexpr, UNIT_WRITES: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x, x_token, x_head, X_GROUP: see `strides`. Without q the write key is A_t k; with it A_t khat, and gain divides by its
    length."""
    if state_indices is not None:
        wait_for_inputs(OVERLAP)
    _, _, n, head, index, held = program_head(state_indices, P, HV, ROWS)
    channel = tl.arange(0, BK)
    is_channel = channel < K
    at_A, in_state, inverse = state_tile(A, index, A_step, head, A_head, held, channel, channel, K, K)
    if state_indices is None:  # no kernel that may still run has written the state
        wait_for_inputs(OVERLAP)
    if q is not None:
        at_z = index * z_step + head * z_head + channel
        total = tl.load(z + at_z, is_channel & held, 0.0)
        if new_seen is None:
            # The programs of all heads read it before the last of them, which overwrites it: its upper half counts them.
            ticket = tl.atomic_add(seen + index * seen_step, tl.full((), 1 << 32, tl.int64), held)
            count_before, writes_count = ticket & 0xFFFFFFFF, (ticket >> 32) == HV - 1
        else:
            count_before, writes_count = tl.load(seen + (index if ROWS == 1 else n), held, 0), head == 0

    first, count = tokens_of_sequence(cu_seqlens, n, T)
    for t in range(count):
        token = first + t
        penalty = load_row(u, token, u_token, head, u_head, U_GROUP, channel, is_channel)
        if q is None:
            weight = load_number(beta, token, beta_token, head, beta_head, BETA_GROUP)
        if q is not None:
            key = load_row(k, token, k_token, head, k_head, K_GROUP, channel, is_channel)
            asked = load_row(q, token, q_token, head, q_head, Q_GROUP, channel, is_channel)

        at = (token * HV + head) * K + channel
        penalty = to_float_or_nan(penalty)
        along = tl.sum(inverse * penalty[:, None], 0)
        overlap = tl.sum(along * penalty, 0)
        if q is None:
            weight = to_float_or_nan(weight)
            share = 1 / (1 + weight * overlap)
            tl.store(write_key + at, share * along, is_channel)
            inverse -= (weight * share * along)[:, None] * along[None, :]
        else:
            weight = 1 / (1 + overlap)
            key, asked = to_float_or_nan(key), to_float_or_nan(asked)
            total += key
            unit_key = key
            if UNIT_KEYS:
                square = tl.sum(key * key, 0)
                unit_key /= tl.sqrt(tl.where(square == 0, 1.0, square))
            along_key = tl.sum(inverse * unit_key[:, None], 0) - weight * tl.sum(along * unit_key, 0) * along
            inverse -= (weight * along)[:, None] * along[None, :]
            if every > 0:
                added = tl.where((count_before + t + 1) % tl.maximum(every, 1) == 0, refresh, 0.0)
                along_key += added * unit_key
                inverse += tl.where(channel[:, None] == channel[None, :], added, 0.0)
            if UNIT_WRITES:
                square = tl.sum(along_key * along_key, 0)
                tl.store(gain + token * HV + head, 1 / tl.sqrt(tl.where(square == 0, 1.0, square)))
            else:
                tl.store(gain + token * HV + head, 1.0)
            divisor = tl.sum(total * asked, 0)
            tl.store(write_key + at, along_key, is_channel)
            tl.store(read_key + at, unit_key, is_channel)
            tl.store(query + at, asked / tl.where(divisor < eps, eps, divisor), is_channel)
        if ROWS > 1:
            keep_state(new_A, at_A, in_state, inverse, index, A_step, state_indices, n, t, P, ROWS)
            if q is not None:
                keep_state(new_z, at_z, is_channel & held, total, index, z_step, state_indices, n, t, P, ROWS)
                at_count, exists = index * seen_step, held & writes_count
                keep_state(
                    new_seen, at_count, exists, count_before + t + 1, index, seen_step, state_indices, n, t, P, ROWS
                )

    if ROWS == 1:
        tl.store(new_A + at_A, inverse, mask=in_state, eviction_policy="evict_first")
        if q is not None:
            tl.store(new_z + at_z, total, mask=is_channel & held)
            tl.store(
                (seen if new_seen is None else new_seen) + index * seen_step, count_before + count, held & writes_count
            )
