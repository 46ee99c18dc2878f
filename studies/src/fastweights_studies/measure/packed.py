"""What it costs that the lengths of packed sequences change from call to call, as they do in training.

    python -m fastweights_studies.measure.packed    forward and backward of every op with kernels, at the judged sizes
    python -m fastweights_studies.measure.packed --tolerance 1.1  exit code 1 where changing lengths take more than 1.1 times as long

On a CUDA device: time of eager calls by events, the device's part and the host's. Without one: processor time around the kernels,
which are replaced by nothing. Calls with one cu_seqlens that stays and with a new one for every call take turns; each column is
the median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from fastweights_studies.measure.environment import describe, file_suffix, write_json
from fastweights_studies.measure.host_time import NAMES, without_kernels
from fastweights_studies.measure.judge.cases import CASES, Case, Sizes
from fastweights_studies.places import RESULTS

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


def measure(case: Case, inputs: Mapping[str, Tensor], sizes: Sizes, device: str) -> dict[str, float]:
    """Milliseconds per call, forward and backward."""
    do = torch.randn_like(inputs["v"])
    same = random_edges(sizes.T, device, 0)

    def call(edges: Tensor) -> None:
        o, _ = case.ours(inputs, backend="triton", cu_seqlens=edges)
        torch.autograd.grad(o, list(inputs.values()), do)

    for _ in range(3):
        call(same)
    found: dict[str, list[float]] = {"unchanging": [], "changing": []}
    for turn in range(TURNS):
        new = [random_edges(sizes.T, device, 1 + turn * CALLS + n) for n in range(CALLS)]
        for name, edges in (("unchanging", [same] * CALLS), ("changing", new)):
            found[name].append(elapsed(lambda edges=edges: [call(e) for e in edges], device) / CALLS)
    medians = {f"{name}_ms": statistics.median(values) for name, values in found.items()}
    return {**medians, "ratio": medians["changing_ms"] / medians["unchanging_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help=f"ops, of {', '.join(NAMES)}")
    parser.add_argument("--sizes", action="append", help=f"B,T,H,K,V with B = 1; {' and '.join(SIZES)} if not given")
    parser.add_argument("--tolerance", type=float, default=1.1, help="largest ratio")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.cuda.get_device_name() if device == "cuda" else "host time, kernels taken out"
    rows: dict[str, dict[str, float]] = {}
    with nullcontext() if device == "cuda" else without_kernels():
        for name in arguments.only.split(","):
            for text in arguments.sizes or (SIZES if device == "cuda" else ON_CPU):
                sizes, case = Sizes.read(text), CASES[name]
                row = measure(case, case.draw(sizes, torch.bfloat16, device, 0), sizes, device)
                rows[f"{name} {text}"] = row
                print(f"{name:12s} {text:20s} " + "  ".join(f"{what} {x:.4f}" for what, x in row.items()), flush=True)
    output = arguments.output or RESULTS / f"packed-{'cpu' if device == 'cpu' else file_suffix(kind)}.json"
    write_json(output, {**describe(), "device": kind, "sequences": SEQUENCES, "rows": rows})
    worse = [key for key, row in rows.items() if row["ratio"] > arguments.tolerance]
    print(f"{len(worse)} over {arguments.tolerance}: {', '.join(worse) or 'none'}; written to {output}")
    raise SystemExit(1 if worse else 0)


if __name__ == "__main__":
    main()
