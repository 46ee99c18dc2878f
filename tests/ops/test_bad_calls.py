"""Every op refuses every argument of a wrong kind, layout or value at once, in words of the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastweights.ops import OPS, short_convolution
from fastweights.ops.framework.spec import Choice, Flag, Integer, Number, Scale
from fastweights.testing.cases import cases_of

from ..bad_calls import check_refused

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested|Nested|quantiz|Sparse|sparse)")
NAN, INFINITE = float("nan"), float("inf")


def tensors(x: Tensor) -> Iterator[Any]:
    """What is no dense floating-point tensor, in the place of x."""
    yield x.to_sparse()
    if x.ndim > 1:
        yield torch.nested.nested_tensor([x[0], x[0]])
        yield torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged)
        yield x.flatten(0, -2).to_sparse_csr()
        if x.is_floating_point():
            yield x.float().to_mkldnn()
    if x.is_floating_point():
        yield torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)
        yield x.to(torch.float8_e4m3fn)
        yield x.long()
    yield from (x.to(torch.complex64), x.bool(), x.numpy(), "x", {}, object())


CU_SEQLENS = (
    torch.tensor([0, 6], device="meta"), torch.tensor([0, 6]).to_sparse(),
    torch.nested.nested_tensor([torch.tensor([0, 6])] * 2), torch.tensor([0.0, 6.0]), torch.tensor([False, True]),
    torch.tensor([0, 6], dtype=torch.int16), torch.tensor([0, 6]).to(torch.complex64), torch.tensor([[0, 6]]),
    torch.tensor([], dtype=torch.int64), torch.tensor(6), [0, 6], np.array([0, 6]), (0, 6), "0,6", 6,
)  # fmt: skip
ALWAYS: tuple[Any, ...] = ("x", [1], {}, torch.ones(2), object())
OPTIONS: dict[type, tuple[Any, ...]] = {
    Number: (*ALWAYS, None, True, NAN, INFINITE, -1, 10**400),
    Scale: (*ALWAYS, True, NAN, INFINITE, 10**400),
    Integer: (*ALWAYS, 0, -1, 1.5, True, NAN, 10**400),
    Choice: (*ALWAYS, None, 3, ""),
    Flag: (*ALWAYS, None, 1, 0.5),
}
FLAGS_AND_BACKENDS = {"output_final_state": OPTIONS[Flag], "backend": ("x", "", None, 3, ["torch"], torch.ones(2))}


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.__name__)
def test_every_argument_of_every_op(op: Callable[..., Any], tmp_path: Path) -> None:
    case = next(iter(cases_of(op).values()))
    inputs = case.draw(batch=1, time=6, heads=1, value_heads=1, key=4, value=4)
    given, states = inputs.arguments(), case(inputs)[1]

    def refused(name: str, value: Any) -> None:
        check_refused(name, lambda: case.op(**{**given, name: value}), tmp_path)

    for name, x in {**inputs.tokens, **inputs.parameters}.items():
        for bad in (*tensors(x), *[None] * (not getattr(case.spec.inputs[name], "optional", False))):
            refused(name, bad)
    for place, state in enumerate(states):
        for bad in tensors(state):
            refused("initial_state", case.initial_state((*states[:place], bad, *states[place + 1 :])))
    for bad in CU_SEQLENS:
        refused("cu_seqlens", bad)
    for name, option in case.spec.options.items():
        for bad in OPTIONS[type(option)]:
            refused(name, bad)
    for name, values in FLAGS_AND_BACKENDS.items():
        for bad in values:
            refused(name, bad)


@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if "iterations" in next(iter(cases_of(op).values())).spec.options]
)
def test_solvers_end(op: Callable[..., Any], tmp_path: Path) -> None:
    case = next(iter(cases_of(op).values()))
    for iterations in (10_001, 10**9, 2**63):
        given = {**case.draw(time=6).arguments(), "iterations": iterations}
        check_refused("iterations", lambda given=given: case.op(**given), tmp_path)  # type: ignore[misc]


def test_short_convolution(tmp_path: Path) -> None:
    given = {"x": torch.zeros(1, 6, 4), "weight": torch.zeros(4, 3), "bias": torch.zeros(4)}
    for name, x in given.items():
        for bad in tensors(x):
            check_refused(name, lambda name=name, bad=bad: short_convolution(**{**given, name: bad}), tmp_path)  # type: ignore[misc]
    for bad in CU_SEQLENS:
        check_refused("cu_seqlens", lambda bad=bad: short_convolution(**given, cu_seqlens=bad), tmp_path)  # type: ignore[misc]
