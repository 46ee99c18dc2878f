"""Grids for many sequences: CUDA runs up to 2^31 - 1 programs along the first axis of a grid, but 65,535 along the others."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.kernel_launches import compiling_nothing

from .cases import KERNEL_CASES, ONE_OF_EACH_FAMILY, draw_states

pytestmark = pytest.mark.compiler
SEQUENCES, LARGEST = 70_000, 65_535


def grids(name: str, packed: bool) -> dict[str, tuple[int, ...]]:
    """By kernel, of a forward and backward with states; the kernels do not run."""
    case, found = KERNEL_CASES[name], dict[str, tuple[int, ...]]()

    def run(kernel: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Any:
        found[kernel.__name__] = grid
        return mock.Mock()

    few = case.draw(batch=1, time=1, heads=1, key=16, value=16, dtype=torch.bfloat16)
    shape = (1, SEQUENCES) if packed else (SEQUENCES, 1)
    tokens = {name: x.expand(*shape, *x.shape[2:]).contiguous() for name, x in few.tokens.items()}
    states = tuple(x.expand(SEQUENCES, *x.shape[1:]).contiguous() for x in draw_states(case, few, 1))
    lengths = {"cu_seqlens": torch.arange(SEQUENCES + 1)} if packed else {}
    inputs = few.__class__(tokens, few.parameters, few.options).map(Tensor.requires_grad_)
    with compiling_nothing(run):
        o, final = case(inputs, initial_state=case.initial_state(states), backend="triton", **lengths)
        results = [x for x in (o, *final) if x.requires_grad]
        torch.autograd.grad([x.sum() for x in results], list(inputs.tokens.values()), allow_unused=True)
    return found


@pytest.mark.parametrize(
    "packed", [pytest.param(False, id="rows", marks=pytest.mark.slow), pytest.param(True, id="packed")]
)
# With so many sequences these take seconds.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.slow if x.startswith(("recursive", "variational", "palimpsa")) else ())
        for x in ONE_OF_EACH_FAMILY
    ],
)
def test_sequences_lie_along_the_first_axis(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.kernels.availability.INTERPRETED", True)  # the ops let them have CPU tensors
    found = grids(name, packed)
    assert found and max(grid[0] for grid in found.values()) >= SEQUENCES
    assert {kernel: grid for kernel, grid in found.items() if max(grid[1:], default=1) > LARGEST} == {}
