"""A call passes few files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastweights
from fastweights.ops import delta_rule
from tests.kernels.described_gpu import described_gpu

PACKAGE = Path(fastweights.__file__).parent


def executed_files(call: Callable[[], Any]) -> set[str]:
    """The files of fastweights whose functions run during a call."""
    found: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            path = Path(frame.f_code.co_filename)
            if PACKAGE in path.parents:
                found.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """What delta_rule by kernels executes, forward and backward: when a plan is recorded for new sizes, and once it is known."""
    monkeypatch.setattr("fastweights.ops.framework.checks.values_can_be_read", lambda x: False)  # as on a GPU
    monkeypatch.setattr("fastweights.ops.framework.call._passed", {})
    for name in ("current_device", "current_stream"):  # on a GPU functions of C
        monkeypatch.setattr(f"fastweights.kernels.runtime.launch_plan.{name}", int)

    def call(time: int) -> None:
        q, k, v = (torch.randn(1, time, 2, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        beta, g = torch.rand(1, time, 2, requires_grad=True), (-torch.rand(1, time, 2)).requires_grad_()
        o, _ = delta_rule(q, k, v, beta, g, backend="triton")
        o.float().sum().backward()

    with described_gpu():
        call(70)  # imports the kernels
        return executed_files(partial(call, 128)), executed_files(partial(call, 128))


@pytest.mark.compiler
def test_a_warm_call_passes_few_files(executed: tuple[set[str], set[str]]) -> None:
    """The op and what it calls, the plan, and the launch."""
    _, warm = executed
    assert "kernels/runtime/launch_plan.py" in warm
    assert len(warm) <= 9, sorted(warm)


@pytest.mark.compiler
def test_a_recorded_call_passes_few_files(executed: tuple[set[str], set[str]]) -> None:
    """In addition the checks, and what records the launches."""
    recording, warm = executed
    assert recording > warm
    assert len(recording) <= 15, sorted(recording)
