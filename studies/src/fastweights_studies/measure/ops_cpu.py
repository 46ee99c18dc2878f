"""Chunkwise `torch` backend against the sequential `reference` on a CPU: forward + backward, float32, medians, both sides
in one run, after a check that their values and gradients agree. Also growth with length and peak memory.

glibc hands large buffers back to the system at every call and gets them again as zeroed pages, which for long sequences costs
up to a third of the time and is not the op's. So the script starts itself again with an allocator that keeps what is freed
(`ALLOCATOR`), for both sides; `--system-allocator` measures without.

    python -m fastweights_studies.measure.ops_cpu
        every op, writes studies/results/ops_cpu.json
    python -m fastweights_studies.measure.ops_cpu --only delta_rule,mesa
        ops whose name begins so; writes with --output only
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastweights.testing import CASES, OpInputs
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.rows import Value, make_rows, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

TASK = "ops_cpu"
RESULT = RESULTS / "ops_cpu.json"
THREADS = 2
SIZES = {"batch": 2, "time": 2048, "heads": 4, "key": 64, "value": 64}
GROWTH = (1024, 8192)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
MEMORY = {"batch": 1, "time": 8192, "heads": 4, "key": 64, "value": 64}


def draw(name: str, **sizes: int) -> OpInputs:
    return CASES[name].draw(**sizes, dtype=torch.float32).map(lambda x: x.requires_grad_())


def forward_backward(name: str, inputs: OpInputs, backend: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    o, _ = CASES[name](inputs, backend=backend, **CASES[name].measured)
    return o.detach(), list(torch.autograd.grad(o.sum(), [*inputs.tokens.values(), *inputs.parameters.values()]))


def seconds(name: str, inputs: OpInputs, backend: str) -> float:
    start = time.perf_counter()
    forward_backward(name, inputs, backend)
    return time.perf_counter() - start


def difference(name: str, inputs: OpInputs) -> float:
    """Largest relative difference (norms) between the backends over o and every gradient."""
    o, gradients = forward_backward(name, inputs, "torch")
    wanted, wanted_gradients = forward_backward(name, inputs, "reference")
    pairs = zip([o, *gradients], [wanted, *wanted_gradients])
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


def resident_kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def peak_of(name: str, queue: Any) -> None:
    torch.set_num_threads(THREADS)
    forward_backward(name, draw(name, **{**MEMORY, "time": 64}), "torch")  # libraries and buffers that stay
    inputs = draw(name, **MEMORY)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident_kilobytes("VmRSS")
    forward_backward(name, inputs, "torch")
    queue.put(1024 * (resident_kilobytes("VmHWM") - before))


def peak_bytes(name: str) -> int | None:
    """What forward + backward adds to the process's memory at its peak, in a process of its own; None where the system
    does not tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak_of, args=(name, queue))
    process.start()
    result = queue.get(timeout=600)
    process.join()
    return result


def measure(name: str, repeats: int) -> dict[str, Value]:
    inputs = draw(name, **SIZES)
    error = difference(name, inputs)  # warms both up as well
    if not error < 1e-3:
        raise SystemExit(f"{name}: the backends differ by {error:.1e}, so no time is reported")
    chunked, reference = [], []
    for _ in range(repeats):  # interleaved, so that a change of the machine's load meets both
        reference.append(seconds(name, inputs, "reference"))
        chunked += [seconds(name, inputs, "torch") for _ in range(3)]
    short, long = (draw(name, **{**SIZES, "time": t}) for t in GROWTH)
    shorts, longs = zip(*((seconds(name, short, "torch"), seconds(name, long, "torch")) for _ in range(repeats + 2)))
    return {
        "difference": error,
        "torch_ms": 1e3 * statistics.median(chunked),
        "reference_ms": 1e3 * statistics.median(reference),
        "growth": statistics.median(longs) / statistics.median(shorts),
        "peak_bytes": peak_bytes(name),
    }


def make_op_rows(op: str, values: Mapping[str, Value], keeps_freed: bool, origin: Origin) -> list[Row]:
    """The rows of an op: times at SIZES, growth from the first to the last of GROWTH, and memory at MEMORY."""
    shared: dict[str, Plain] = {"op": op, "threads": THREADS, "keeps_freed": keeps_freed}
    columns: dict[str, dict[str, Plain]] = {
        name: {**shared, **SIZES} for name in ("difference", "torch_ms", "reference_ms")
    }
    columns["growth"] = {**shared, **SIZES, "time": GROWTH[-1], "from_time": GROWTH[0]}
    columns["peak_bytes"] = {**shared, **MEMORY}
    return [
        row for name, value in values.items() for row in make_rows(TASK, origin, {name: value}, column=columns[name])
    ]


def measured_with_an_op(row: Row) -> Hashable:
    return row.task, row.column["op"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ops whose name begins with one of these, separated by commas")
    parser.add_argument(
        "--output", type=Path, help=f"result file; {RESULT.name} beside this script when all ops are run"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timings of the reference (three times as many of torch)"
    )
    parser.add_argument("--system-allocator", action="store_true", help="leave the allocator as it is")
    arguments = parser.parse_args()
    if not arguments.system_allocator and not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    torch.set_num_threads(THREADS)
    names = [name for name in CASES if name.startswith(tuple(arguments.only.split(",")))]
    if not names:
        raise SystemExit(f"--only {arguments.only!r} matches none of: {', '.join(CASES)}")
    print(f"{'forward + backward, ' + str(SIZES):70s}")
    print(
        f"{'op':36s} {'torch ms':>9s} {'reference':>10s} {'speedup':>8s} {'8x T':>6s} {'peak MB':>8s} {'difference':>11s}"
    )
    rows, origin, keeps_freed = [], describe(), ALLOCATOR.items() <= os.environ.items()
    for name in names:
        found = measure(name, arguments.repeats)
        rows += make_op_rows(name, found, keeps_freed, origin)
        chunked, reference, growth, peak, error = (
            math.nan if found[what] is None else float(found[what])  # type: ignore[arg-type]
            for what in ("torch_ms", "reference_ms", "growth", "peak_bytes", "difference")
        )
        print(
            f"{name:36s} {chunked:9.1f} {reference:10.0f} {reference / chunked:8.1f} "
            f"{growth:6.2f} {peak / 2**20:8.0f} {error:11.1e}",
            flush=True,
        )
    output = arguments.output or (None if arguments.only else RESULT)
    if output is not None:
        replace_rows(output, rows, measured_with_an_op)
        print(f"written to {output}")


if __name__ == "__main__":
    main()
