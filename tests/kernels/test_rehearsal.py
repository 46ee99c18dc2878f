"""Before the first launch all kernels of a forward or a backward are compiled side by side: the very ones that are launched."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastweights.testing import OpCase
from tests.contract.compare import values_and_gradients

from .cases import KERNEL_CASES, draw_states

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True)
def on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that is described and not there; every call is the first of its kind."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    monkeypatch.setattr("fastweights.ops._shared.backends.INTERPRETED", True)
    for module in ("forward", "backward"):
        monkeypatch.setattr(f"fastweights.ops._triton.{module}.is_new", lambda plan, *what: plan.device.type != "meta")
    for kernel in kernels():
        monkeypatch.setattr(kernel, "compiled", {})
    described = mock.Mock()
    described.get_current_device.return_value = described.get_current_stream.return_value = 0
    described.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    before = driver._active
    driver.set_active(described)
    yield
    driver._active = before


def kernels() -> list[Any]:
    from fastweights.ops import _triton
    from fastweights.ops._triton.jit import Kernel

    modules = [import_module(f"{_triton.__name__}.{module.name}") for module in iter_modules(_triton.__path__)]
    return [x for module in modules for x in vars(module).values() if isinstance(x, Kernel)]


def call(case: OpCase, time: int) -> None:
    """Forward and backward, with states and their gradients."""
    inputs = case.draw(time=time, batch=2, heads=1, value_heads=2, dtype=torch.bfloat16)
    states = tuple(s.clone().requires_grad_() for s in draw_states(case, inputs, 2))
    values_and_gradients(case, inputs, states, backend="triton")


class Launches:
    """In place of Triton's `run`: what would be compiled, and what launched."""

    def __init__(self) -> None:
        self.compiled: set[tuple[Any, ...]] = set()
        self.launched: set[tuple[Any, ...]] = set()

    def run(self, kernel: Any, *places: Any, grid: Any, warmup: bool, **choices: Any) -> Any:
        given = tuple(x.dtype if isinstance(x, Tensor) else x for x in places)
        assert not warmup or all(x.device.type == "meta" for x in places if isinstance(x, Tensor))
        (self.compiled if warmup else self.launched).add((kernel.__name__, given, *choices.items()))
        return mock.Mock()


@pytest.mark.parametrize("time", [200, 70])
@pytest.mark.parametrize("name", [name for name in KERNEL_CASES if name != "precondition_keys"])
def test_all_that_is_launched(name: str, time: int, short_segments: None) -> None:
    from triton.runtime.jit import JITFunction

    launches = Launches()
    with mock.patch.object(JITFunction, "run", lambda kernel, *places, **rest: launches.run(kernel, *places, **rest)):
        call(KERNEL_CASES[name], time)
    assert launches.launched and launches.launched == launches.compiled


def test_a_kind_is_new_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastweights.ops._shared.sequences import Sequences
    from fastweights.ops._triton import rehearsal
    from fastweights.ops._triton.plan import Inputs, Plan

    monkeypatch.setattr(rehearsal, "_seen", set())
    x = torch.zeros(1, 70, 2, 16)
    plans = [
        Plan(Inputs(x, x, x, **gates), Sequences(1, 70))
        for gates in ({}, {"g": x[..., 0]}, {"g": x}, {"beta": x[..., 0]})
    ]
    assert not rehearsal.is_new(plans[0], True)  # not on a GPU
    for plan in plans:
        plan.device = torch.device("cuda", 0)
        for what in (True, False):
            assert rehearsal.is_new(plan, what) and not rehearsal.is_new(plan, what)


def test_nothing_is_left_to_compile() -> None:
    from fastweights.ops._triton import jit

    def launch(kernel: jit.Kernel, grid: Any, *places: Any, **choices: Any) -> None:
        """As on a GPU, with what is launched found among the compiled ones."""
        if jit.compiling.get() is None:
            with mock.patch.object(jit.Kernel, "_do_compile", side_effect=AssertionError("compiles again")):
                assert kernel.run(*places, grid=grid, warmup=True, **choices).asm["cubin"]
        else:
            real(kernel, grid, *places, **choices)

    real, ready = jit.Kernel.launch, []
    with mock.patch.object(jit.Kernel, "launch", launch), mock.patch.object(jit, "make_ready", ready.append):
        call(KERNEL_CASES["linear_attention-none"], 70)
    assert len(ready) >= 5


def test_an_error_waits_for_the_launch() -> None:
    from triton import CompilationError

    from fastweights.ops._triton import jit
    from fastweights.ops._triton.cumulate import cumulate

    x = torch.empty(8, device="meta")
    wrong = {"PH": 3, "HEADS_G": 1}  # no power of two
    with jit.side_by_side():
        cumulate[1, 1](x, x, x, 8, **wrong)
    with pytest.raises(CompilationError):
        cumulate.run(x, x, x, 8, grid=(1, 1), warmup=True, **wrong)
