"""The ops that update their states in place, and what the tests of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights import ops
from fastweights.testing import CASES, OpCase, OpInputs

IN_PLACE: dict[Callable[..., Any], Callable[..., Tensor]] = {
    ops.linear_attention: ops.linear_attention_,
    ops.delta_rule: ops.delta_rule_,
    ops.preconditioned_delta_rule: ops.preconditioned_delta_rule_,
}
DECODING = {name: case for name, case in CASES.items() if case.op in IN_PLACE}


def draw_states(case: OpCase, inputs: OpInputs, count: int, seed: int = 5) -> tuple[Tensor, ...]:
    """States in float64: S of any numbers, A of positive ones."""
    generator = torch.Generator().manual_seed(seed)
    heads, value = inputs.tokens["v"].shape[2:]
    S = torch.randn(count, heads, inputs.tokens["k"].shape[3], value, generator=generator, dtype=torch.float64)
    return (S, S[..., 0].abs())[: len(case.states)]


def in_place(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...], **keywords: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """o and the states after the call, in copies of these in the dtype of the computation."""
    dtype = torch.float64 if inputs.tokens["v"].dtype == torch.float64 else torch.float32
    held = tuple(s.to(inputs.tokens["v"].device, dtype, copy=True) for s in states)
    o = IN_PLACE[case.op](**inputs.arguments(), state=case.initial_state(held), **keywords)
    return o, held


def exact(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...], **keywords: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs = inputs.map(lambda x: x.cpu().double())
    return case(inputs, initial_state=case.initial_state(states), backend="reference", **keywords)


def largest_error(got: tuple[Tensor, tuple[Tensor, ...]], wanted: tuple[Tensor, tuple[Tensor, ...]]) -> float:
    pairs = zip((got[0], *got[1]), (wanted[0], *wanted[1]), strict=True)
    return max(float(((g.cpu() - w).abs() / (1 + w.abs())).max()) for g, w in pairs if w.numel())


def call_decode(inputs: OpInputs, states: tuple[Tensor, ...], new: tuple[Tensor | None, ...], scale: float) -> Tensor:
    """The kernel's own function on the inputs of a case."""
    from fastweights.kernels.recurrent.decode import Preconditioner, decode

    tokens = dict(inputs.tokens)
    preconditioner = None
    if "precond_g" in tokens:
        gates = tokens.pop("precond_g"), tokens.pop("precond_beta")
        preconditioner = Preconditioner(states[1], new[1], *gates, inputs.parameters["center"], 1.5, 1e-6)
    return decode(**tokens, state=states[0], new_state=new[0], preconditioner=preconditioner, scale=scale)
