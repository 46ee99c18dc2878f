"""One sequence over several processes is one sequence: `cp_group` changes no number and no gradient.

The op must be in a module that other processes can import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ...ops.framework.call import Op
from ..cases import OpCase, OpInputs, cases_of
from ..processes import processes
from .compare import assert_close, random_states, values_and_gradients
from .equivalence import EXACT
from .forms import first_form_is_fast

__all__ = ["test_divided_packed_is_whole", "test_divided_rows_are_whole"]

Found = tuple[list[Tensor], list[Tensor]]


def find_part(
    op: Callable[..., Any], form: str, inputs: OpInputs, states: tuple[Tensor, ...], way: str, keywords: dict[str, Any]
) -> Found:  # fmt: skip
    """`values_and_gradients` of this process's part of the tokens, twice the same to the last bit."""
    import torch.distributed as dist

    from ...ops.context_parallel.group import ContextParallel

    group = dist.group.WORLD
    assert group is not None
    cp = ContextParallel(group, way)  # type: ignore[arg-type]
    keywords = {**keywords, "cp_group": cp}
    case = cases_of(op)[form]
    (values, grads), again = (values_and_gradients(case, inputs, states, part=cp, **keywords) for _ in range(2))
    for a, b in zip([*values, *grads], [*again[0], *again[1]]):
        assert torch.equal(a, b)
    return values, grads


def ways_of(case: OpCase) -> list[str]:
    given = {name: case.dims.get(name) for name in case.spec.inputs}
    passing = case.spec.passing
    return ["heads", "state"] if passing is not None and passing.serves(given) else ["heads"]


def assert_divided_is_whole(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...], size: int, **keywords: Any
) -> None:
    """By each way that the form has."""
    op = case.op if isinstance(case.op, Op) else case.op.__wrapped__  # type: ignore[attr-defined]
    form = next(name for name, one in cases_of(op).items() if one is case)
    wanted = values_and_gradients(case, inputs, states, **keywords)
    for way in ways_of(case):
        parts = processes(size).run(find_part, op, form, inputs, states, way, keywords)
        outputs, *finals = zip(*(values for values, _ in parts))
        assert_close([torch.cat(outputs, 1), *(final[0] for final in finals)], wanted[0], EXACT)
        assert all(torch.equal(a, final[0]) for final in finals for a in final)
        assert_close([sum(of_ranks) for of_ranks in zip(*(grads for _, grads in parts))], wanted[1], EXACT)


SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
@first_form_is_fast
def test_divided_rows_are_whole(case: OpCase, size: int) -> None:
    """Their heads do not divide by the processes."""
    inputs = case.draw(time=9 * size, heads=size + 1)
    assert_divided_is_whole(case, inputs, random_states(case, inputs), size)


@pytest.mark.parametrize("size", SIZES)
@first_form_is_fast
def test_divided_packed_is_whole(case: OpCase, size: int) -> None:
    """One document is empty, one lies in several parts, and one key head serves the value heads of all processes."""
    time = 70 * size
    edges = torch.tensor([0, 3, 3, 68, time - 2, time])
    inputs = case.draw(batch=1, time=time, heads=1, value_heads=2 * size)
    others = case.draw(batch=5, time=6, heads=1, value_heads=2 * size, seed=3)
    assert_divided_is_whole(case, inputs, random_states(case, others), size, cu_seqlens=edges)
