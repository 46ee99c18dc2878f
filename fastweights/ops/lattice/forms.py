"""Lattice token by token, which is the specification, and chunk by chunk, exact.

How far a step turns a slot depends on where the slot points, so the chunks follow each other. A step of size a takes in the part
of h across the slot, where (with h and c of the rule both turned over if that saves a sign)
    similarity: h = v, a = gamma k        encode: h = v, a = gamma (k - S v)        decode: h = v - S^T k, a = gamma k
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from .coefficients import Coefficients
from .on_slots import Sequential
from .proximal import Proximal
from .slots import clamp_decay, direction_and_length, inverse
from .workspace import Workspace

CHUNK = 32


def reference(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, decay: Tensor | None, S: Tensor,
    *, objective: str, normalize: bool, l1: float,
) -> tuple[Tensor, tuple[Tensor]]:  # fmt: skip
    """q, k [B,T,H,K]; v [B,T,H,V]; gamma, decay [B,T,H]; S [B,H,K,V]."""
    queries, keys, values = q[..., None, :].unbind(1), k[..., None].unbind(1), v[..., None, :].unbind(1)
    rates = gamma[..., None, None].unbind(1)
    kept: Iterable[Any] = repeat(1.0) if decay is None else clamp_decay(decay)[..., None, None].unbind(1)
    slots, length = direction_and_length(S)
    outputs = []
    for q_t, k_t, v_t, gamma_t, decay_t in zip(queries, keys, values, rates, kept):
        if objective == "decode":
            h, c = k_t.mT @ slots - v_t, k_t
        elif objective == "encode":
            h, c = v_t, slots @ v_t.mT - k_t
        else:
            h, c = -v_t, k_t
        orthogonal = h - slots * (slots @ h.mT)
        S = decay_t * length * slots - gamma_t * inverse(length) * c * orthogonal
        if l1:
            S = S.sign() * (S.abs() - gamma_t * l1).clamp_min(0)
        slots, length = direction_and_length(S)
        if normalize:
            length = (length > 0).to(length)
        outputs.append(((q_t * length.mT) @ slots)[..., 0, :])
    return stack_time(outputs, v), (length * slots,)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, decay: Tensor | None, S: Tensor,
    sequences: Sequences, *, objective: str, normalize: bool, l1: float,
) -> tuple[Tensor, tuple[Tensor]]:  # fmt: skip
    chunks = Chunks(sequences, CHUNK, v.device)
    gain = gamma[..., None]
    decay = torch.ones_like(gain) if decay is None else clamp_decay(decay)[..., None]
    tokens = {"q": chunks.split(q), "v": chunks.split(v), "write": chunks.split(gain * k)}
    tokens["decay"] = chunks.split(decay, fill=1.0)
    if objective == "decode":
        tokens["key"] = chunks.split(k)
    if objective == "encode":
        tokens["shrink"] = chunks.split(gain.expand_as(k))
    if l1:
        tokens["pull"] = chunks.split(l1 * gain)
    workspace = Workspace()
    outputs: list[Tensor] = []

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        lead = states[0].shape[:2]
        part = {name: x.flatten(0, 1) for name, x in zip(tokens, parts)}
        slots, length = (x.flatten(0, 1) for x in states)
        given = [part["q"], part["v"], part["write"], part.get("shrink"), part["decay"], slots, length]
        if l1:
            o, *end = Proximal.apply(*given, part.get("key"), part["pull"], normalize)
        else:
            there = length > 0
            given[2], given[6] = part["write"] * there, length.masked_fill(~there, 1.0)
            if objective == "encode":
                given[3] = part["shrink"] * there
            # Coefficients have to be looked at, for which a device would be waited for; of a single token the slots are as quick.
            if normalize and objective != "decode" and chunks.size > 1:
                o, *end = step_by_coefficients(given, workspace)
            else:
                o, *end = Sequential.apply(*given, part.get("key"), normalize)
            end[1] = end[1] * there
        outputs.append(o.unflatten(0, lead))
        return tuple(x.unflatten(0, lead) for x in end)

    slots, length = direction_and_length(S)
    _, (slots, length) = chunks.scan(step, (slots, length.mT), *tokens.values())
    o = torch.cat(outputs) if outputs else tokens["v"]
    return chunks.merge(o), (slots * length.mT,)


def step_by_coefficients(given: list[Tensor | None], workspace: Workspace) -> list[Tensor]:
    """o, slots and length by coefficients, or on the slots themselves in rows where coefficients do not hold."""
    *results, hold = Coefficients.apply(*given, workspace)
    if hold.all():
        return results
    rows = (~hold).nonzero()[:, 0]
    others = Sequential.apply(*(None if x is None else x[rows] for x in given), None, True)
    return [result.index_copy(0, rows, other) for result, other in zip(results, others)]
