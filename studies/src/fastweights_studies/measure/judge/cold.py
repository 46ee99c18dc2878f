"""Seconds of the first forward + backward in a new process, by stages: with an empty kernel cache, then with the one it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastweights_studies.places import SOURCES

from .cases import Sizes

PROGRAM = """
import json, sys, time
from importlib import import_module
import torch
from fastweights_studies.measure.judge.cases import CASES, Sizes

name, sizes, dtype, backend = sys.argv[1:]
case = CASES[name]
inputs = case.draw(Sizes.read(sizes), getattr(torch, dtype), "cuda", 0)
torch.cuda.synchronize()
marks = [time.perf_counter()]
for work in (
    lambda: backend == "torch" or import_module("fastweights.kernels.chunk.memory"),
    lambda: case.ours(inputs, backend=backend)[0],
    lambda: torch.autograd.grad(found.sum(), list(inputs.values())),
):
    found = work()
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""
STAGES = ("imports", "forward", "backward")


def cold_starts(
    asked: Sequence[tuple[str, Sizes]], dtype: str, backend: str, processes: int
) -> Iterator[dict[str, Any]]:
    """`cold_start` of every op and size, so many processes at a time: with one per core, what compiling all of them takes."""
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(lambda one: cold_start(one[0], one[1], dtype, backend), asked)


def cold_start(name: str, sizes: Sizes, dtype: str, backend: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM, name, str(sizes), dtype, backend]
        found: dict[str, Any] = {}
        for cache in ("empty_cache", "warm_cache"):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seconds = json.loads(done.stdout)
            found |= {f"{cache}_s": sum(seconds), f"{cache}_stages_s": dict(zip(STAGES, seconds))}
    return found
