"""Times on a CUDA device, several calls interleaved: called eagerly (CUDA events), as a replayed graph (device time alone), and
where a call cannot be captured the sum of its kernels' times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]


class Milliseconds(NamedTuple):
    """Median, and the quartiles as a measure of spread."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: list[float]) -> Milliseconds:
        if len(times) < 2:
            return cls(times[0], times[0], times[0])
        low, median, high = statistics.quantiles(times, n=4)
        return cls(median, low, high)


def interleaved(works: Mapping[str, Work], repeats: int, calls: int = 1) -> dict[str, Milliseconds]:
    """Time of each work, `repeats` rounds over all of them, so that a change of clocks meets all. A flush of the L2 cache
    stands before every timing."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return {name: Milliseconds.of(values) for name, values in times.items()}


def kernel_times(works: Mapping[str, Work], repeats: int) -> dict[str, Milliseconds]:
    """The time of all kernels of each work, which leaves the gaps between them out, in rounds as `interleaved`."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            flush.zero_()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
                work()
                torch.cuda.synchronize()
            times[name].append(sum(event.self_device_time_total for event in found.key_averages()) / 1e3)
    return {name: Milliseconds.of(values) for name, values in times.items()}


def as_graph(work: Work) -> Work:
    """The work captured once, as a replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def peak_bytes(work: Work) -> int:
    """What the work adds to the allocated memory at its peak."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Ceilings(NamedTuple):
    """Measured on this device: bytes per second of a copy (read and written), operations per second of a bf16 matrix product.
    float32: instructions per second of all its float32 lanes, 128 per multiprocessor, at 1.755 GHz."""

    bandwidth: float
    rate: float
    float32: float

    @classmethod
    def measure(cls) -> Ceilings:
        source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        found = interleaved({"copy": lambda: target.copy_(source), "product": lambda: a @ a}, 10)
        lanes = 128 * torch.cuda.get_device_properties(a.device).multi_processor_count
        return cls(
            2 * len(source) / found["copy"].median * 1e3, 2 * 8192**3 / found["product"].median * 1e3, lanes * 1.755e9
        )
