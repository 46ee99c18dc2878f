"""Lattice chunk by chunk, exact. The chunks follow each other: every step turns a slot by how it stands.

A step of size a takes in the part of h across the slot, where (with h and c of the rule both turned over if that saves a sign)
    similarity: h = v, a = gamma k        encode: h = v, a = gamma (k - S v)        decode: h = v - S^T k, a = gamma k
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..framework.sequences import Chunks, Sequences
from .coefficients import Coefficients
from .on_slots import Sequential
from .proximal import Proximal
from .slots import clamp_decay, direction_and_length
from .workspace import Workspace

CHUNK = 32


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
            if normalize and objective != "decode":
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
