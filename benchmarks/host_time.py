"""Processor time of the kernels' ops: of all that is done around the kernels, which are replaced by nothing. No GPU is needed.

    python benchmarks/host_time.py          every op of the judge, writes benchmarks/results/host_time.json

What it leaves out: the driver's part of a launch, torch's allocator on a GPU, and the thread in which autograd runs there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from environment import describe, write_json
from judge.cases import CASES, Sizes
from judge.measuring import forward, forward_backward

from fastweights.kernels import availability
from fastweights.ops.framework import checks

RESULT = Path(__file__).parent / "results" / "host_time.json"
SIZES = Sizes(B=2, T=128, H=2, K=64, V=64)  # the numbers do not matter, nothing is computed
NAMES = [name for name in CASES if name != "mesa"]  # it has no kernels
CALLS, ROUNDS = 100, 40


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    output = parser.parse_args().output
    from triton.runtime.jit import JITFunction

    torch.set_num_threads(1)
    rows = {}
    with (
        mock.patch.object(availability, "INTERPRETED", True),  # tensors on a CPU may go to the kernels,
        mock.patch.object(checks, "values_can_be_read", lambda x: False),  # and are not looked at, as on a GPU
        mock.patch.object(JITFunction, "run", lambda kernel, *given, **options: Nothing()),
    ):
        for name in NAMES:
            rows[name] = measure(name)
            print(f"{name:12s} " + "  ".join(f"{what} {value:6.1f}" for what, value in rows[name].items()), flush=True)
    write_json(output, {**describe(), "rows": rows})
    print(f"written to {output}")


if __name__ == "__main__":
    main()
