"""Ops over several processes by passing states: outputs, final states and gradients are those of one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.ops.context_parallel import collectives
from fastweights.ops.context_parallel.costs import H100_LINK, estimate_seconds, exchanged_bytes, link_speed
from fastweights.ops.context_parallel.group import ContextParallel
from fastweights.ops.framework.checks import Sizes, check_inputs
from fastweights.testing import CASES
from fastweights.testing.cases import OpCase, OpInputs
from fastweights.testing.contract.compare import EXTREMES, assert_close, mix_extremes, random_states, relative_error
from fastweights.testing.contract.divided import ways_of
from fastweights.testing.processes import processes

from .parts import compile_part, refusal

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
PASSING = [name for name, case in CASES.items() if "state" in ways_of(case)]


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
@pytest.mark.parametrize("name", PASSING)
def test_every_form(name: str) -> None:
    compare([(name, form, "mixed", begun) for form in EDGES for begun in (False, True)], 4)
    compare([(name, "over three borders", change, True) for change in EXTREMES], 4)


def read_kinds(name: str, dtype: torch.dtype) -> list[float]:
    """How far outputs and final states of one process and of this part of several are from those of float64."""
    cp, case = ContextParallel(dist.group.WORLD, "state"), CASES[name]
    inputs = mix_extremes(case, case.draw(batch=1, time=256, key=16, value=16, dtype=dtype), 1)
    (o, states), (exact, exact_states) = case(inputs), case(inputs.map(Tensor.double))
    part = slice(256 // cp.size * cp.rank, 256 // cp.size * (cp.rank + 1))
    own, own_states = case(inputs.at((slice(None), part)), cp_group=cp)
    assert own.dtype == dtype
    pairs = [(o[:, part], own, exact[:, part]), *zip(states, own_states, exact_states)]
    return [relative_error(x, wanted) for *found, wanted in pairs for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    """At most twice that of one process."""
    for name in ("delta_rule-none", "linear_attention-head", "recursive_least_squares-none"):
        for found in processes(2).run(read_kinds, name, dtype):
            for one, several in zip(found[::2], found[1::2]):
                assert several <= 2 * one + torch.finfo(torch.float32).eps


def spread_nan(name: str) -> None:
    """A NaN stays in its document, and in its column of the values."""
    cp, case = ContextParallel(dist.group.WORLD, "state"), CASES[name]
    for token, edges in ((2, [0, 14, 30, 48]), (20, [0, 14, 30, 48]), (2, None)):
        for of in ("k", "v"):
            inputs = case.draw(batch=1, time=TIME, heads=1)
            inputs.tokens[of][0, token, 0, 1] = math.nan
            given = {} if edges is None else {"cu_seqlens": torch.tensor(edges)}
            (o, states), (own, own_states) = (
                case(inputs, **given), case(inputs.at((slice(None), part_of(cp))), **given, cp_group=cp)
            )  # fmt: skip
            for x, whole in zip((own, *own_states), (o[:, part_of(cp)], *states)):
                torch.testing.assert_close(x, whole, equal_nan=True)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_nan_stays_in_its_document(ranks: int) -> None:
    for name in ("delta_rule-head", "linear_attention-channel", "mesa"):
        processes(ranks).run(spread_nan, name)


def refuse() -> list[str]:
    cp = ContextParallel(dist.group.WORLD, "state")
    messages = []
    for name in ("palimpsa", "recursive_least_squares-head"):
        case = CASES[name]
        messages.append(refusal(lambda case=case: case(case.draw(time=8), cp_group=cp)))
    one_head = CASES["delta_rule-head"].draw(time=8, heads=1)
    CASES["delta_rule-head"](one_head, cp_group=ContextParallel(dist.group.WORLD))  # auto takes the way that serves
    return messages


def test_rules_without_states_that_pass() -> None:
    for palimpsa, least_squares in processes(2).run(refuse):
        assert palimpsa.startswith("way must be 'heads' or 'auto' for palimpsa, whose state after a part is no affine")
        assert least_squares.startswith(
            "way must be 'heads' or 'auto' for recursive_least_squares with g, whose state after"
        )


def costs(name: str, time: int, **more: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes and seconds of both ways, on four processes in 16 bits."""
    case = CASES[name]
    inputs = case.draw(batch=1, time=1, heads=8, key=128, value=128, dtype=torch.bfloat16)
    named = {x: inputs.tokens[x].to("meta").expand(1, time, *inputs.tokens[x].shape[2:]) for x in inputs.tokens}
    named = {**dict.fromkeys(case.spec.inputs), **named}
    sizes = Sizes(1, time, 8, 8, 128, 128)
    sent = {way: exchanged_bytes(case.spec, named, sizes, 4, way, False) for way in ("heads", "state")}
    return sent, estimate_seconds(case.spec, named, sizes, 4, more.get("count"), "auto")


def test_costs() -> None:
    """q, k, v and o of 8 heads and 128 channels, g and beta; a state and a transition in float32."""
    sent, _ = costs("delta_rule-head", 1000)
    assert sent == {"heads": 1000 * 2 * (4 * 8 * 128 + 2 * 8) * 3 / 4, "state": 3 * 4 * 8 * 128 * (128 + 128)}
    assert costs("linear_attention-head", 1000)[0]["state"] == 3 * 4 * 8 * (128 * 128 + 1)
    for name in ("linear_attention-none", "delta_rule-head", "mesa"):
        for length, way in ((64, "heads"), (32768, "state")):
            _, seconds = costs(name, length)
            assert min(seconds, key=lambda name: seconds[name]) == way
    many, few = (costs("linear_attention-none", 32768, count=count)[1]["state"] for count in (1000, 1))
    assert many > 2 * few

    assert link_speed(H100_LINK, 9) == link_speed(H100_LINK, 8) / 9  # over a network


def count_bytes(names: Sequence[str]) -> list[tuple[float, float]]:
    """What this process sends for a call by each way of these ops, in rows and packed, as counted and as expected."""
    found, sent = [], 0

    def exchange(out: Tensor, x: Tensor, received: Any, parts: Any, group: Any) -> None:
        nonlocal sent
        size, rank = group.size(), group.rank()
        sent += x.nbytes - (x.nbytes // size if parts is None else x[0].nbytes * parts[rank])
        all_to_all(out, x, received, parts, group=group)

    def gather(out: Tensor, x: Tensor, group: Any) -> None:
        nonlocal sent
        sent += (group.size() - 1) * x.nbytes
        all_gather(out, x, group=group)

    all_to_all, all_gather = dist.all_to_all_single, collectives._gather_into
    with mock.patch.object(dist, "all_to_all_single", exchange), mock.patch.object(collectives, "_gather_into", gather):
        for case in map(CASES.__getitem__, names):
            for way, packed in itertools.product(ways_of(case), (False, True)):
                cp, sent = ContextParallel(dist.group.WORLD, way), 0
                inputs = case.draw(batch=1 if packed else 2, time=8, heads=2, value_heads=4, dtype=torch.bfloat16)
                given = {"cu_seqlens": torch.tensor([0, 3, 8 * cp.size])} if packed else {}
                case.op(**inputs.arguments(), **given, cp_group=cp)
                named = {name: inputs.arguments().get(name) for name in case.spec.inputs}
                sizes = check_inputs(case.spec, tuple(named.values()))
                found.append((sent, exchanged_bytes(case.spec, named, sizes, cp.size, way, packed)))
    return found


@pytest.mark.parametrize(
    "names", [["delta_rule-head", "precondition_keys", "mesa"], pytest.param([*CASES], marks=pytest.mark.slow)]
)
def test_expected_bytes_are_sent(names: list[str]) -> None:
    """The costs, by which a way is chosen and a training planned, count what the collectives send."""
    for of_rank in processes(2).run(count_bytes, names):
        for sent, expected in of_rank:
            assert sent == expected > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_rule-head", "preconditioned_delta_rule-none", "gated_kalmanet-exact"])
def test_one_graph(name: str) -> None:
    processes(2).run(compile_part, name, "state")
