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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastweights_studies.places import ROOT, SOURCES

__all__ = ["Compared", "compare", "warm_checkouts"]

ROUNDS, REPLAYS = 15, 10
STAGES = ("forward", "forward_backward")

# Reads one line per measurement: the name of an op, sizes, dtype and stage, or nothing for another turn with the last one. With
# no turns to take, the kernels of the op are compiled, and that is all.
PROGRAM = f"""
import json, sys
from functools import partial
import torch
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.measure.judge.measuring import forward, forward_backward
from fastweights_studies.measure.judge.timing import as_graph, interleaved, peak_bytes

for line in sys.stdin:
    if line.strip():
        name, sizes, dtype, stage = json.loads(line)
        case = CASES[name]
        inputs = case.draw(Sizes.read(sizes), getattr(torch, dtype), "cuda", 0)
        call = lambda x: case.ours(x)[0]
        do = torch.randn_like(inputs["v"])
        work = partial(forward, call, inputs) if stage == "forward" else partial(forward_backward, call, inputs, do)
        memory = peak_bytes(work)
        if "--compile" in sys.argv:
            continue
        graph = as_graph(work)
    print(json.dumps([interleaved({{"ours": graph}}, {REPLAYS})["ours"].median, memory]), flush=True)
"""


@dataclass(frozen=True)
class Compared:
    """An op at one size in one pass, of this checkout ("after") and of the other ("before")."""

    op: str
    sizes: str
    stage: str
    ms: dict[str, float]
    peak_bytes: dict[str, int]

    @property
    def time_ratio(self) -> float:
        return self.ms["after"] / self.ms["before"]

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes["after"] / self.peak_bytes["before"] if self.peak_bytes["before"] else 1.0


def environment_of(root: Path) -> dict[str, str]:
    """That of a process with the library of a checkout and this judge."""
    paths = [str(root), str(SOURCES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def measuring(root: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=environment_of(root),
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: subprocess.Popen[str], line: str) -> tuple[float, int]:
    """Milliseconds and bytes of one turn."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process that measures ended with code {process.wait()} at {line}")
    milliseconds, memory = json.loads(answer)
    return milliseconds, memory


def warm_checkouts(base: Path, names: Sequence[str], sizes: Sequence[str], dtype: str, processes: int) -> None:
    """Compile the kernels of both checkouts, several processes at a time; what fails here is compiled when it is measured."""

    def run(root: Path, name: str) -> None:
        lines = [json.dumps([name, shape, dtype, stage]) for shape in sizes for stage in STAGES]
        command = [sys.executable, "-c", PROGRAM, "--compile"]
        subprocess.run(command, input="\n".join(lines), text=True, cwd=root, env=environment_of(root))

    with ThreadPoolExecutor(processes) as pool:
        work = [(root, name) for root in (ROOT, base.resolve()) for name in names]
        list(pool.map(lambda one: run(*one), work))


def compare(base: Path, names: Sequence[str], sizes: Sequence[str], dtype: str) -> Iterator[Compared]:
    """For every op, size and stage: medians of both checkouts."""
    with ExitStack() as stack:
        processes = {
            which: stack.enter_context(measuring(root)) for which, root in (("after", ROOT), ("before", base.resolve()))
        }
        for name in names:
            for shape in sizes:
                for stage in STAGES:
                    first = json.dumps([name, shape, dtype, stage])
                    turns: dict[str, list[float]] = {which: [] for which in processes}
                    memory = {}
                    for turn in range(ROUNDS):
                        for which, process in processes.items():
                            time, memory[which] = ask(process, "" if turn else first)
                            turns[which].append(time)
                    times = {which: statistics.median(found) for which, found in turns.items()}
                    yield Compared(name, shape, stage, times, memory)
