"""Processor time of the ops: of all that is done around the kernels, which are replaced by nothing.

It imports nothing of the library but what an older checkout has too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from fastweights.kernels import availability
from fastweights.kernels.runtime import launch_plan
from fastweights.ops.framework import checks

from .cases import CASES, Sizes
from .measuring import forward, forward_backward

__all__ = ["SIZES", "measure_host", "without_kernels"]

SIZES = Sizes(B=2, T=128, H=2, K=64, V=64)  # the numbers do not matter, nothing is computed
CALLS, ROUND, LONGEST = 100, 0.01, 0.4  # calls of a round, or what fits into ROUND seconds; seconds of all rounds


class Nothing:
    """In place of a compiled kernel."""

    function, packed_metadata = 0, ()

    def run(self, *arguments: object) -> None:
        pass


def measure_microseconds(work: Callable[[], object]) -> float:
    """The least of many rounds: others on the machine only add."""
    begin = time.perf_counter()
    work()
    calls = max(1, min(CALLS, int(ROUND / (time.perf_counter() - begin))))
    best = float("inf")
    while best == float("inf") or time.perf_counter() - begin < LONGEST:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def measure_host(name: str) -> dict[str, float]:
    """Microseconds of an op: forward, and forward and backward. One thread of torch."""
    torch.set_num_threads(1)
    case = CASES[name]
    inputs = case.draw(SIZES, torch.bfloat16, "cpu", 0)
    do = torch.randn_like(inputs["v"])

    def call(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return case.ours(x, "triton")[0]

    both = {"forward": partial(forward, call, inputs), "forward_backward": partial(forward_backward, call, inputs, do)}
    with without_kernels():
        for work in both.values():
            work()
        return {f"{stage}_us": measure_microseconds(work) for stage, work in both.items()}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Tensors on a CPU go to the kernels, which do nothing; their numbers are not looked at, as on a GPU."""
    from triton.runtime.jit import JITFunction

    with (
        mock.patch.object(availability, "INTERPRETED", True),
        mock.patch.object(checks, "values_can_be_read", lambda x: False),
        mock.patch.object(JITFunction, "run", lambda kernel, *given, **options: Nothing()),
        mock.patch.object(launch_plan, "compile_all", lambda launches: [Nothing() for _ in launches]),
    ):
        yield
