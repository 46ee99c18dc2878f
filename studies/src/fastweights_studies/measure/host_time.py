"""Processor time of the kernels' ops: of all that is done around the kernels, which are replaced by nothing. No GPU is needed.

    python -m fastweights_studies.measure.host_time                     every op of the judge, writes studies/results/host_time.json
    python -m fastweights_studies.measure.host_time --against CHECKOUT  beside another checkout, in turns; writes host_time_against.json

With --against, exit code 1 says that an op takes more than --tolerance times the other checkout's time.

What it leaves out: the driver's part of a launch, torch's allocator on a GPU, and the thread in which autograd runs there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

from fastweights.kernels import availability
from fastweights.ops.framework import checks
from fastweights_studies.measure.environment import ROOT, commit, describe, source, write_json
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.measure.judge.measuring import forward, forward_backward
from fastweights_studies.places import RESULTS, SOURCES

RESULT = RESULTS / "host_time.json"
SIZES = Sizes(B=2, T=128, H=2, K=64, V=64)  # the numbers do not matter, nothing is computed
NAMES = list(CASES)
CALLS, ROUNDS, TURNS = 100, 40, 3


class Nothing:
    """In place of a compiled kernel."""

    function, packed_metadata = 0, ()

    def run(self, *arguments: object) -> None:
        pass


def microseconds(work: Callable[[], object]) -> float:
    """The least of several rounds: others on the machine only add."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def measure(name: str) -> dict[str, float]:
    case = CASES[name]
    inputs = case.draw(SIZES, torch.bfloat16, "cpu", 0)
    do = torch.randn_like(inputs["v"])

    def call(x: dict[str, torch.Tensor]) -> torch.Tensor:
        return case.ours(x, "triton")[0]

    both = {"forward": partial(forward, call, inputs), "forward_backward": partial(forward_backward, call, inputs, do)}
    for work in both.values():
        work()
    return {f"{stage}_us": microseconds(work) for stage, work in both.items()}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Tensors on a CPU go to the kernels, which do nothing; their numbers are not looked at, as on a GPU."""
    from triton.runtime.jit import JITFunction

    with (
        mock.patch.object(availability, "INTERPRETED", True),
        mock.patch.object(checks, "values_can_be_read", lambda x: False),
        mock.patch.object(JITFunction, "run", lambda kernel, *given, **options: Nothing()),
    ):
        yield


def measure_all(output: Path) -> None:
    torch.set_num_threads(1)
    rows = {}
    with without_kernels():
        for name in NAMES:
            rows[name] = measure(name)
            print(f"{name:12s} " + "  ".join(f"{what} {value:6.1f}" for what, value in rows[name].items()), flush=True)
    write_json(output, {**describe(), "rows": rows})
    print(f"written to {output}")


def compare(base: Path, tolerance: float, output: Path) -> bool:
    """Both checkouts in turns; the least time of each. Whether ours are within the tolerance."""
    roots = {"ours": ROOT, "base": base.resolve()}
    least: dict[str, dict[str, dict[str, float]]] = {who: {} for who in roots}
    with TemporaryDirectory() as folder:
        result = Path(folder, "host_time.json")
        for _ in range(TURNS):
            for who, root in roots.items():
                command = [sys.executable, "-m", "fastweights_studies.measure.host_time", "--output", str(result)]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(SOURCES)])}
                subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.DEVNULL)
                for name, row in json.loads(result.read_text())["rows"].items():
                    best = least[who].setdefault(name, row)
                    least[who][name] = {what: min(value, best[what]) for what, value in row.items()}
    rows, worse = {}, []
    for name, ours in least["ours"].items():
        for what, value in ours.items():
            ratio = value / least["base"][name][what]
            rows[f"{name} {what}"] = {"ours": value, "base": least["base"][name][what], "ratio": ratio}
            worse += [f"{name} {what}"] if ratio > tolerance else []
            print(f"{name:12s} {what:20s} {value:6.1f} us, base {least['base'][name][what]:6.1f}, ratio {ratio:.3f}")
    write_json(output, {**describe(), "base": {"commit": commit(base), "source": source(base)}, "rows": rows})
    print(f"{len(worse)} over {tolerance}: {', '.join(worse) or 'none'}; written to {output}")
    return not worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--tolerance", type=float, default=1.03, help="of --against: largest ratio")
    arguments = parser.parse_args()
    if arguments.against:
        output = arguments.output or RESULT.with_name("host_time_against.json")
        raise SystemExit(0 if compare(arguments.against, arguments.tolerance, output) else 1)
    measure_all(arguments.output or RESULT)


if __name__ == "__main__":
    main()
