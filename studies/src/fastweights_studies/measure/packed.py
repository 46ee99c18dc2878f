"""What it costs that the lengths of packed sequences change from call to call, as they do in training.

    python -m fastweights_studies.measure.packed
        forward and backward of every op with kernels, at the judged sizes
    python -m fastweights_studies.measure.packed --tolerance 1.1
        exit code 1 where changing lengths take more than 1.1 times as long

On a CUDA device: time of eager calls by events, the device's part and the host's. Without one: processor time around the kernels,
which are replaced by nothing. Calls with one cu_seqlens that stays and with a new one for every call take turns; each column is
the median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.judge.cases import CASES, Case, Sizes
from fastweights_studies.measure.judge.host import without_kernels
from fastweights_studies.measure.judge.records import sizes_column
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "packed"
NAMES = list(CASES)
SIZES = ("1,8192,8,128,128", "1,8192,16,128,128", "1,32768,8,128,128")
ON_CPU = ("1,256,2,64,64",)  # nothing is computed
SEQUENCES, CALLS, TURNS = 16, 20, 15


def random_edges(time: int, device: str, seed: int) -> Tensor:
    """cu_seqlens of SEQUENCES sequences of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(time + 1, (SEQUENCES - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([time])]).int().to(device)


def elapsed(work: Callable[[], object], device: str) -> float:
    """Milliseconds."""
    if device == "cpu":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(case: Case, inputs: Mapping[str, Tensor], sizes: Sizes, device: str) -> dict[bool, float]:
    """Milliseconds per call, forward and backward, by whether lengths change."""
    do = torch.randn_like(inputs["v"])
    same = random_edges(sizes.T, device, 0)

    def call(edges: Tensor) -> None:
        o, _ = case.ours(inputs, backend="triton", cu_seqlens=edges)
        torch.autograd.grad(o, list(inputs.values()), do)

    for _ in range(3):
        call(same)
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS):
        new = [random_edges(sizes.T, device, 1 + turn * CALLS + n) for n in range(CALLS)]
        for changing, edges in ((False, [same] * CALLS), (True, new)):
            found[changing].append(elapsed(partial(run_all, call, edges), device) / CALLS)
    return {changing: statistics.median(values) for changing, values in found.items()}


def run_all(call: Callable[[Tensor], None], edges: Sequence[Tensor]) -> None:
    for one in edges:
        call(one)


def make_packed_rows(op: str, sizes: Sizes, on_gpu: bool, found: Mapping[bool, float], origin: Origin) -> list[Row]:
    """One row for lengths that stay, and one for lengths that change. Without a GPU they are of the host alone."""
    column = {"op": op, **sizes_column(sizes), "sequences": SEQUENCES, "kernels": on_gpu}
    return [
        row
        for changing, milliseconds in found.items()
        for row in make_rows(
            TASK, origin, {"forward_backward_ms": milliseconds}, column={**column, "changing": changing}
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help=f"ops, of {', '.join(NAMES)}")
    parser.add_argument("--sizes", action="append", help=f"B,T,H,K,V with B = 1; {' and '.join(SIZES)} if not given")
    parser.add_argument("--tolerance", type=float, default=1.1, help="largest ratio")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu, worse = device == "cuda", []
    origin = describe(torch.cuda.get_device_name() if on_gpu else None)
    output = arguments.output or name_file(RESULTS, "packed", origin.device if on_gpu else "cpu")
    with nullcontext() if on_gpu else without_kernels():
        for name in arguments.only.split(","):
            for text in arguments.sizes or (SIZES if on_gpu else ON_CPU):
                sizes, case = Sizes.read(text), CASES[name]
                found = measure(case, case.draw(sizes, torch.bfloat16, device, 0), sizes, device)
                replace_rows(output, make_packed_rows(name, sizes, on_gpu, found, origin))
                ratio = found[True] / found[False]
                print(
                    f"{name:12s} {text:20s} {found[False]:.4f} ms, changing {found[True]:.4f}, ratio {ratio:.4f}",
                    flush=True,
                )
                worse += [f"{name} {text}"] if ratio > arguments.tolerance else []
    print(f"{len(worse)} over {arguments.tolerance}: {', '.join(worse) or 'none'}; written to {output}")
    raise SystemExit(1 if worse else 0)


if __name__ == "__main__":
    main()
