"""What the processes of a training send each other, and what it adds to the time of a step. Bytes are counted; times are
predictions from the rates of data sheets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...checks import error_prefix
from ...distributed import context_parallel
from ...models import FastWeightsForCausalLM
from ...ops.context_parallel.planned import PlannedGroup
from .run import LanguageRun

__all__ = [
    "Exchange",
    "describe_exchanges",
    "exchanged_bytes",
    "exchanges",
    "gradient_bytes",
    "tokens_of_process",
]
NOTED = {
    "heads": ("heads", "to_heads"),
    "state": ("state",),
}  # by ways, under which names; to_heads is of softmax attention


@dataclass(frozen=True)
class Exchange:
    """What layers of one kind exchange under context parallelism.

    Attributes:
        mixer: their kind.
        layers: how many they are.
        way: "heads", "state", or both where a layer calls several ops.
        sent: bytes that a process sends per layer in the forward of a pass. The backward sends as many.
        tokens: of a process in a pass.
        held: bytes that a process holds for it in the backward of one layer.
    """

    mixer: str
    layers: int
    way: str
    sent: int
    tokens: int
    held: float


def exchanges(run: LanguageRun, model: Any) -> list[Exchange]:
    """By kinds of layers, in the order of their first ones. model: may be without memory for its weights, on the meta device.

    Raises:
        ValueError: a layer that cannot be divided over so many processes, or a hybrid with attention of transformers.
    """
    mixers: dict[str, list[Any]] = {}
    if not isinstance(model, FastWeightsForCausalLM):
        raise ValueError(
            f"context_parallel must be 1 with a {type(model).__name__}, whose attention reads whole rows, got "
            f"{run.context_parallel}; set it to 1"
        )
    blocks: Any = model.model.layers
    for block, entry in zip(blocks, model.config.mixers(), strict=True):
        mixers.setdefault(repr(entry), []).append((entry[0], block.mixer))
    return [_exchange(run, name, mixer, len(same)) for same in mixers.values() for name, mixer in same[-1:]]


def _exchange(run: LanguageRun, name: str, mixer: Any, layers: int) -> Exchange:
    tokens, group = tokens_of_process(run), PlannedGroup(run.context_parallel)
    dtype = torch.float32 if run.precision == "no" else torch.bfloat16
    planned = copy.deepcopy(mixer).to(device="meta", dtype=dtype)
    with error_prefix(f"context_parallel = {run.context_parallel}"), torch.no_grad():
        context_parallel(planned, group)
        planned(torch.empty(1, tokens, mixer.hidden_size, dtype=dtype, device="meta"))
    ways = [way for way, names in NOTED.items() if any(group.sent[name] for name in names)]
    return Exchange(name, layers, " and ".join(ways), group.sent.total(), tokens, group.held)


def tokens_of_process(run: LanguageRun, rows: int | None = None) -> int:
    """Tokens of a process in a pass that reads so many rows; when None those of a pass after all batch ramps."""
    return -(-(run.batch_size if rows is None else rows) * run.length // run.context_parallel)


def describe_exchanges(found: list[Exchange]) -> Iterator[str]:
    """A line for each kind of layers."""
    for one in found:
        yield (
            f"{one.layers} layers of {one.mixer} by {one.way}, {one.sent / one.tokens:,.0f} bytes per token and layer sent in a "
            "forward"
        )


def exchanged_bytes(run: LanguageRun, model: Any) -> float:
    """What a process sends to its context group in a step: in forward and backward of all layers, and of the forward twice with
    gradient_checkpointing."""
    if run.context_parallel == 1:
        return 0.0
    times = (3 if run.gradient_checkpointing else 2) * run.accumulation
    return float(times * sum(one.layers * one.sent for one in exchanges(run, model)))


def gradient_bytes(run: LanguageRun, model: Any, processes: int) -> float:
    """What a process sends for gradients and parameters in a step: with DDP gradients once out and once back; with FSDP2
    parameters for the forward and the backward of every pass, and gradients out."""
    parameters, share = model.num_parameters(only_trainable=True), (processes - 1) / processes
    gradient = getattr(torch, run.reduce_dtype).itemsize
    if not run.fsdp:
        return 2 * gradient * share * parameters
    gathered = (2 if run.reshard_after_forward else 1) * (4 if run.precision == "no" else 2)
    return (gathered + gradient) * run.accumulation * share * parameters
