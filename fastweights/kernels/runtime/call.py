"""One kind of call: its launches forward and backward, gone through once and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.framework.sequences import Sequences
from ..chunk.sizes import Inputs, Plan
from .compiling import Launch
from .launch_plan import Schedule
from .workspace import Buffer

__all__ = ["Call", "Rule", "as_input", "call_of"]

KEPT = 256  # kinds of call, the latest


class Rule(NamedTuple):
    """What is launched, told by going through it with buffers. forward(inputs, plan, *numbers, final): the results, and what
    backward needs (`Saved`). backward(inputs, plan, *numbers, saved, *asked, states): the gradients of the inputs, where `asked`
    are those of the results and `states` says whether those of the initial states are wanted."""

    forward: Callable[..., tuple[Sequence[Buffer | None], Sequence[Buffer | None]]]
    backward: Callable[..., Inputs]


class Kind(NamedTuple):
    """What the launches of a call depend on. inputs: shape and dtype of each; learns: whether what backward needs is kept."""

    rule: Rule
    inputs: tuple[Any, ...]
    sequences: Sequences
    device: torch.device
    numbers: tuple[float, ...]
    final: bool
    learns: bool


def call_of(
    rule: Rule, x: Inputs, sequences: Sequences, numbers: tuple[float, ...], *, final: bool, learns: bool
) -> Call:  # fmt: skip
    """x: tensors, or buffers where no kernel reads them."""
    shapes = tuple([None if t is None else (t.shape, t.dtype) for t in x])
    return _call(Kind(rule, shapes, sequences, x.q.device, numbers, final, learns))


class Call:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.inputs = Inputs(*(None if what is None else Buffer(*what) for what in kind.inputs))
        self.backwards: dict[tuple[bool, ...], Schedule] = {}

    def plan(self) -> Plan:
        return Plan(self.inputs, self.kind.sequences, self.kind.device)

    @cached_property
    def recorded(self) -> tuple[Sequence[Launch], Sequence[Buffer | None], Sequence[Buffer | None]]:
        """A forward's launches, its results, and what a backward needs."""
        plan = self.plan()
        results, saved = self.kind.rule.forward(self.inputs, plan, *self.kind.numbers, self.kind.final)
        return plan.launches, results, saved

    @property
    def saved(self) -> Sequence[Buffer | None]:
        return self.recorded[2]

    @cached_property
    def forward(self) -> Schedule:
        """The results, and where the call learns what a backward needs."""
        launches, results, saved = self.recorded
        return Schedule(launches, self.inputs, [*results, *(saved if self.kind.learns else ())], self.kind.device)

    def backward(
        self, x: Inputs, saved: Sequence[Tensor | None], asked: Sequence[Tensor | None], states: bool
    ) -> Inputs:  # fmt: skip
        """The gradients of the inputs; all tensors contiguous and aligned."""
        flags = (*[d is None for d in asked], states)
        schedule = self.backwards.get(flags)
        if schedule is None:
            schedule = self.backwards[flags] = self._backward(asked, states)
        return Inputs(*map(as_input, x, schedule.play((*x, *saved, *asked))))

    def _backward(self, asked: Sequence[Tensor | None], states: bool) -> Schedule:
        kind, plan = self.kind, self.plan()
        given = [None if d is None else Buffer(d.shape, d.dtype) for d in asked]
        found = kind.rule.backward(self.inputs, plan, *kind.numbers, self.saved, *given, states)
        return Schedule(plan.launches, (*self.inputs, *self.saved, *given), found, kind.device)


def as_input(x: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """A gradient as the kernels give it, in the shape and dtype of its input: summed over value heads that share it."""
    if x is None or gradient is None or (x.shape == gradient.shape and x.dtype == gradient.dtype):
        return gradient
    if x.shape[2] != gradient.shape[2]:
        gradient = gradient.unflatten(2, (x.shape[2], -1)).sum(3, dtype=torch.float32)
    return gradient.to(x.dtype)


_call = lru_cache(maxsize=KEPT)(Call)
