"""Profiles of a training step as lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.measure import scaling
from fastweights_studies.measure.step_timeline import draw, overlap, read_trace, summarize

from fastweights.training.language import LanguageRun

from .test_scaling import TINY, text

__all__ = ["text"]


def event(kind: str, name: str, begin: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": 1000 * begin, "dur": 1000 * duration}


STEP = [
    event("cuda_runtime", "cudaLaunchKernel", 100.0, 1.0),
    event("cuda_runtime", "cudaDeviceSynchronize", 101.0, 50.0),
    event("kernel", "matmul", 102.0, 4.0),
    event("kernel", "norm", 105.0, 3.0),
    event("kernel", "ncclDevKernel_AllReduce", 107.0, 5.0),
    event("gpu_memcpy", "copy", 115.0, 1.0),
    event("cpu_op", "aten::mm", 100.0, 9.0),
]


def test_a_trace_becomes_lanes() -> None:
    lanes = read_trace(STEP)
    assert lanes == {
        "host": [[0.0, 1.0]],
        "compute": [[2.0, 8.0], [15.0, 16.0]],
        "communication": [[7.0, 12.0]],
    }
    assert summarize(lanes) == pytest.approx(
        {
            "profiled_step_ms": 14.0, "compute_ms": 7.0, "communication_ms": 5.0, "overlapped_ms": 1.0, "idle_ms": 3.0,
            "host_calls_ms": 1.0,
        }
    )  # fmt: skip


def test_an_overlap_is_the_time_in_both() -> None:
    assert overlap([[0.0, 4.0], [6.0, 9.0]], [[3.0, 7.0], [8.0, 20.0]]) == 3.0


def test_lanes_are_drawn(tmp_path: Path) -> None:
    draw({"one": read_trace(STEP), "none": read_trace([])}, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_a_step_of_a_training_is_profiled(tmp_path: Path, text: Path) -> None:
    """Without a GPU there is nothing on its lanes; the timed steps are those before the profiled ones."""
    run = LanguageRun(output=str(tmp_path / "run"), **{**TINY, "max_steps": scaling.WARM + 5})
    row = scaling.train(run, text, timeline=True)
    assert row is not None and row["steps"] == 2 and row["lanes"] == {"host": [], "compute": [], "communication": []}
