"""Device time and memory of our ops beside another checkout of the repository, both measured in one run.

Each checkout has a process of its own, which captures the op as a CUDA graph. The processes take turns, so that a change of
clocks meets both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastweights_studies.places import ROOT, SOURCES

ROUNDS, REPLAYS = 15, 10
STAGES = ("forward", "forward_backward")

# Reads one line per measurement: the name of an op, sizes, dtype and stage, or nothing for another turn with the last one.
PROGRAM = f"""
import json, sys
from functools import partial
import torch
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.measure.judge.measuring import forward, forward_backward
from fastweights_studies.measure.judge.timing import as_graph, interleaved, peak_megabytes

for line in sys.stdin:
    if line.strip():
        name, sizes, dtype, stage = json.loads(line)
        case = CASES[name]
        inputs = case.draw(Sizes.read(sizes), getattr(torch, dtype), "cuda", 0)
        call = lambda x: case.ours(x)[0]
        do = torch.randn_like(inputs["v"])
        work = partial(forward, call, inputs) if stage == "forward" else partial(forward_backward, call, inputs, do)
        memory = peak_megabytes(work)
        graph = as_graph(work)
    print(json.dumps([interleaved({{"ours": graph}}, {REPLAYS})["ours"].median, memory]), flush=True)
"""


@contextmanager
def measuring(root: Path) -> Iterator[subprocess.Popen[str]]:
    paths = [str(root), str(SOURCES)]  # the library of the checkout, judged by this judge
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: subprocess.Popen[str], line: str) -> tuple[float, float]:
    """Milliseconds and megabytes of one turn."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process that measures ended with code {process.wait()} at {line}")
    milliseconds, megabytes = json.loads(answer)
    return milliseconds, megabytes


def compare(base: Path, names: Sequence[str], sizes: Sequence[str], dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """For every op, size and stage: medians of both checkouts, and ours over the base's."""
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(measuring(root)) for root in (ROOT, base.resolve()))
        for name in names:
            for shape in sizes:
                for stage in STAGES:
                    first = json.dumps([name, shape, dtype, stage])
                    turns: dict[str, list[float]] = {"ours": [], "base": []}
                    memory = {}
                    for turn in range(ROUNDS):
                        for who, process in (("ours", ours), ("base", theirs)):
                            time, memory[who] = ask(process, "" if turn else first)
                            turns[who].append(time)
                    times = {who: statistics.median(found) for who, found in turns.items()}
                    yield f"{name} {shape} {stage}", {
                        "ms": times, "mb": memory, "time_ratio": times["ours"] / times["base"],
                        "memory_ratio": memory["ours"] / memory["base"] if memory["base"] else 1.0,
                    }  # fmt: skip
