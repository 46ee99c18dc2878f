"""Models whose sequences are divided over several GPUs: as exact as on one, and the same bits when repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from .context_parallel_worker import COMPILED, MODELS

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("several GPUs"), several]
ROOT = Path(__file__).parents[2]
GPUS = 4 if torch.cuda.device_count() >= 4 else 2
CASES = [f"{name} {way}" for name, (_, ways) in MODELS.items() for way in ways]


def log_of(path: Path) -> Path:
    return path.with_suffix(".log")


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the models whose tests run. Three groups of processes share the GPUs, since most of their time is that of compiling."""
    folder, rows = tmp_path_factory.mktemp("context"), {}
    worker = str(Path(__file__).with_name("context_parallel_worker.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={GPUS}", worker]
    cases = {item.callspec.params["case"].split()[0] for item in request.session.items if item.module is request.module}
    names = [name for name in MODELS if name in cases]
    parts = [part for i in range(3) if (part := names[i::3])]
    paths = [folder / f"{i}.json" for i in range(len(parts))]
    with ExitStack() as logs:
        started = [
            subprocess.Popen([*command, path, *names], cwd=ROOT, stderr=logs.enter_context(log_of(path).open("w")))
            for path, names in zip(paths, parts, strict=True)
        ]
        for process, path in zip(started, paths, strict=True):
            assert process.wait(500) == 0, log_of(path).read_text()[-5000:]
            rows |= json.loads(path.read_text())
    return rows


@pytest.mark.parametrize("case", [*CASES, *(f"{case} compiled" for case in CASES if case.startswith(COMPILED))])
def test_a_divided_sequence_is_as_exact_as_a_whole_one(rows: dict[str, Any], case: str) -> None:
    """bfloat16 within twice the rounding of one GPU; float32 within that of TF32 products."""
    row = rows[case]
    assert row["divided"]["gradients"] <= 2 * row["alone"]["gradients"]
    assert row["divided"]["loss"] <= 2 * row["alone"]["loss"] + 1e-4
    assert row["float32"]["gradients"] < 2e-2 and row["float32"]["loss"] < 1e-4
    assert row["same_bits"]
