"""The contract of an op with Triton kernels: they compute what the loop does. Beside the rest of the contract:

    from fastweights.testing.contract.by_kernels import *

They run on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1 before pytest; elsewhere they are skipped. The interpreter
takes seconds per test, so sizes are small.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ...kernels.availability import HAS_TRITON, INTERPRETED
from ..cases import OpCase, OpInputs
from .compare import assert_close, random_states, relative_error, replace_tokens, values_and_gradients
from .numbers import DTYPES

__all__ = [
    "test_kernels_are_sequential",
    "test_kernels_contain_bad_numbers",
    "test_kernels_in_low_precision",
    "test_kernels_of_grouped_heads",
    "test_kernels_of_packed_sequences",
    "test_kernels_read_segments",
]

CLOSE = 3e-5  # float32
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def draw_small(case: OpCase, time: int, **sizes: Any) -> OpInputs:
    """One row of one head in float32, unless other sizes are given."""
    if not case.has_kernels:
        pytest.skip("this form has no kernels")
    if not (HAS_TRITON and (INTERPRETED or DEVICE == "cuda")):
        pytest.skip("needs triton, and a GPU or TRITON_INTERPRET=1")
    given = {"batch": 1, "heads": 1, "key": 8, "value": 6, "dtype": torch.float32, **sizes}
    return case.draw(time=time, **given).map(lambda x: x.to(DEVICE))


def assert_kernels_are_sequential(
    case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...] | None = None, **keywords: Any
) -> None:
    """Values and gradients, those of the states included, are the loop's in float64."""
    exact = None if states is None else tuple(s.double() if s.is_floating_point() else s for s in states)
    got = values_and_gradients(case, inputs, states, backend="triton", **keywords)
    wanted = values_and_gradients(case, inputs.map(Tensor.double), exact, backend="reference", **keywords)
    for g, w in zip(got, wanted):
        assert_close(g, w, CLOSE)


@pytest.mark.parametrize("time", [1, 65])
def test_kernels_are_sequential(case: OpCase, time: int) -> None:
    inputs = draw_small(case, time, key=5, value=17)
    assert_kernels_are_sequential(case, inputs, random_states(case, inputs, backend="reference"))


def test_kernels_of_packed_sequences(case: OpCase) -> None:
    """One of them is empty."""
    inputs = draw_small(case, 20)
    states = tuple(s.repeat_interleave(4, 0) for s in random_states(case, inputs, backend="reference"))
    assert_kernels_are_sequential(case, inputs, states, cu_seqlens=torch.tensor([0, 3, 3, 19, 20], device=DEVICE))


def test_kernels_of_grouped_heads(case: OpCase) -> None:
    assert_kernels_are_sequential(case, draw_small(case, 20, batch=2, heads=2, value_heads=4))


def test_kernels_read_segments(case: OpCase) -> None:
    inputs = draw_small(case, 70)
    whole, final = case(inputs, backend="triton")
    outputs: list[Tensor] = []
    states: tuple[Tensor, ...] = ()
    for start, stop in [(0, 3), (3, 64), (64, 65), (65, 70)]:
        keywords = {"initial_state": case.initial_state(states)} if start else {}
        o, states = case(inputs.at((slice(None), slice(start, stop))), backend="triton", **keywords)
        outputs.append(o)
    assert_close([torch.cat(outputs, 1), *states], [whole, *final], CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_in_low_precision(case: OpCase, dtype: torch.dtype) -> None:
    inputs = draw_small(case, 20, dtype=dtype)
    (o, *_), gradients = values_and_gradients(case, inputs, backend="triton")
    (wanted, *_), wanted_gradients = values_and_gradients(case, inputs.map(Tensor.double), backend="reference")
    assert o.dtype == dtype and relative_error(o, wanted) <= DTYPES[dtype]
    for got, exact in zip(gradients, wanted_gradients):
        assert got.dtype == dtype and relative_error(got, exact) <= 5 * DTYPES[dtype]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_kernels_contain_bad_numbers(case: OpCase, bad: float) -> None:
    """One bad number per input leaves earlier tokens and other sequences as they are, and spoils the token that reads it."""
    inputs = draw_small(case, 12)
    edges = torch.tensor([0, 4, 9, 12], device=DEVICE)
    clean, _ = case(inputs, backend="triton", cu_seqlens=edges)
    for name, x in inputs.tokens.items():
        if "decay" in case.tokens[name] and not math.isnan(bad):
            continue  # a positive log decay is refused
        broken = x.clone()
        broken[(0, 5, 0) + (0,) * (x.ndim - 3)] = bad
        o, _ = case(replace_tokens(inputs, **{name: broken}), backend="triton", cu_seqlens=edges)
        assert torch.equal(o[:, :5], clean[:, :5]) and torch.equal(o[:, 9:], clean[:, 9:]), name
        assert o[:, 5:9].isnan().any(), name
