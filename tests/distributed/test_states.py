"""Ops over several processes by passing states: outputs, final states and gradients are those of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.ops.context_parallel.group import ContextParallel
from fastweights.ops.context_parallel.ways import choose_way, exchanged_bytes, extra_macs
from fastweights.ops.framework.checks import Sizes
from fastweights.testing import CASES
from fastweights.testing.cases import OpCase, OpInputs
from fastweights.testing.contract.compare import EXTREMES, assert_close, mix_extremes, random_states
from fastweights.testing.processes import processes

TIME = 48  # borders between the parts of 2 and 4 processes: at 12, 24 and 36
# None for rows of one sequence each.
EDGES: dict[str, list[int] | None] = {
    "rows": None,
    "one document": [0, 48],
    "over three borders": [0, 5, 46, 48],
    "at the borders": [0, 12, 24, 36, 48],
    "empty ones at borders": [0, 0, 12, 12, 30, 48, 48],
    "many": [0, 3, 4, 20, 23, 25, 26, 40, 48],
}
CHANGES = {"mixed": lambda case, inputs: mix_extremes(case, inputs, 3)} | {
    name: lambda case, inputs, change=change: OpInputs(
        {x: change(case.tokens[x], number) for x, number in inputs.tokens.items()}, inputs.parameters, inputs.options
    )
    for name, change in EXTREMES.items()
}
PASSING = [
    name
    for name, case in CASES.items()
    if case.spec.passing is not None and case.spec.passing.serves({x: case.dims.get(x) for x in case.spec.inputs})
]


def draw(name: str, form: str, change: str, begun: bool) -> tuple[OpCase, OpInputs, dict[str, Any], list[Tensor]]:
    """The case, its whole inputs, other arguments, and all tensors that have a gradient."""
    case, edges = CASES[name], EDGES[form]
    inputs = case.draw(batch=2 if edges is None else 1, time=TIME, value_heads=4)
    inputs = CHANGES[change](case, inputs) if change else inputs
    inputs = inputs.map(lambda x: x.detach().requires_grad_())
    given = {} if edges is None else {"cu_seqlens": torch.tensor(edges, dtype=torch.int32)}
    states = random_states(case, inputs, **given) if begun else ()
    states = tuple(x.requires_grad_() for x in states)
    more = {**given, "initial_state": case.initial_state(states)} if begun else given
    return case, inputs, more, [*inputs.tokens.values(), *inputs.parameters.values(), *states]


def differentiate(o: Tensor, states: Sequence[Tensor], leaves: list[Tensor], ranks: int = 1) -> list[Tensor]:
    """Gradients of a function of the outputs and the final states, which each rank has."""
    total = o.double().sin().sum() + torch.stack([x.double().sin().sum() / ranks for x in states]).sum()
    return list(torch.autograd.grad(total, leaves, materialize_grads=True))


def read_part(requests: Sequence[tuple[str, str, str, bool]], way: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    cp = ContextParallel(dist.group.WORLD, way)
    found = []
    for request in requests:
        case, inputs, given, leaves = draw(*request)
        o, states = case(inputs.at((slice(None), part_of(cp))), **given, cp_group=cp)
        found.append(([o.detach(), *(x.detach() for x in states)], differentiate(o, states, leaves, cp.size)))
    return found


def part_of(cp: ContextParallel) -> slice:
    return slice(TIME // cp.size * cp.rank, TIME // cp.size * (cp.rank + 1))


def compare(requests: Sequence[tuple[str, str, str, bool]], ranks: int) -> None:
    parts = processes(ranks).run(read_part, requests, "state")
    for request, *of_ranks in zip(requests, *parts, strict=True):
        case, inputs, given, leaves = draw(*request)
        o, states = case(inputs, **given)
        results, grads = zip(*of_ranks)
        outputs, *finals = zip(*results)
        wanted = [o.detach(), *(x.detach() for x in states)]
        try:
            assert_close([torch.cat(outputs, 1), *(x[0] for x in finals)], wanted, 1e-10)
            assert_close([sum(x) for x in zip(*grads)], differentiate(o, states, leaves), 1e-10)
        except AssertionError as error:
            raise AssertionError(request) from error
        for final in finals:  # on every rank the same bits
            assert all(torch.equal(x, final[0]) for x in final)


def test_two_processes() -> None:
    """A rule of each kind, over borders of documents and in rows, from zeros and from states."""
    names = ["linear_attention-channel", "delta_rule-head-write", "preconditioned_delta_rule-channel", "mesa"]
    names += ["precondition_keys", "delta_product-head", "dplr_delta_rule-channel", "recursive_least_squares-none"]
    compare([(name, form, "mixed", True) for name in names for form in ("rows", "many")], 2)
    compare([("delta_rule-none", "one document", "", False), ("linear_attention-none", "rows", "", False)], 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PASSING)
def test_every_form(name: str, ranks: int) -> None:
    compare([(name, form, "mixed", begun) for form in EDGES for begun in (False, True)], ranks)
    compare([(name, form, change, True) for form in ("rows", "over three borders") for change in ("", *EXTREMES)], ranks)
