"""The judge of the GPU kernels: correctness first, then time, memory and the distance from the floor, beside the peers.

    python benchmarks/kernels.py                                  every op at the default sizes, in bfloat16
    python benchmarks/kernels.py --only gdn,pgdn --sizes 4,2048,8,128,128 --backend torch
    python benchmarks/kernels.py --cold gdn                       first forward + backward from an empty kernel cache

An op whose values or gradients exceed the error budgets against float64 gets no time. Times are medians of interleaved calls:
`eager` as called, `graph` as a replayed CUDA graph, which is device time alone. Peers are timed where they are installed and
their errors are reported too. Writes benchmarks/results/kernels-<device>.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import describe, write_json
from judge.accuracy import errors, outputs, over_budget
from judge.cases import CASES, Case, Sizes
from judge.peers import peers
from judge.timing import Ceilings, as_graph, interleaved, peak_megabytes
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
SIZES = ("4,2048,8,128,128", "1,8192,16,128,128", "1,32768,8,128,128")
Call = Callable[[Mapping[str, Tensor]], Tensor]


def forward(call: Call, inputs: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        call(inputs)


def forward_backward(call: Call, inputs: Mapping[str, Tensor], do: Tensor) -> None:
    torch.autograd.grad(call(inputs), list(inputs.values()), do, allow_unused=True)


def check(case: Case, calls: Mapping[str, Call], sizes: Sizes, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Errors of every call against our chunkwise form in float64, on inputs of their own."""
    inputs = case.draw(sizes, dtype, "cuda", seed=torch.seed() % 2**31)
    do = torch.randn_like(inputs["v"])
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    wanted = outputs(lambda x: case.ours(x, backend="torch")[0], exact, do.double())
    return {name: errors(outputs(call, inputs, do), wanted) for name, call in calls.items() if name != "sdpa"}


def judge(
    name: str, sizes: Sizes, dtype: torch.dtype, backend: str, repeats: int, ceilings: Ceilings
) -> dict[str, Any]:
    case = CASES[name]
    calls: dict[str, Call] = {"ours": lambda x: case.ours(x, backend=backend)[0], **peers(name)}
    found = check(case, calls, sizes, dtype)
    refused = over_budget(found["ours"], dtype)
    if refused:
        return {"errors": found, "refused": refused}
    inputs = case.draw(sizes, dtype, "cuda", seed=0)
    do = torch.randn_like(inputs["v"])
    row: dict[str, Any] = {"errors": found}
    for stage in ("forward", "forward_backward"):
        backward = stage == "forward_backward"
        works = {
            who: partial(forward_backward, call, inputs, do) if backward else partial(forward, call, inputs)
            for who, call in calls.items()
        }
        floor = max(case.bytes(inputs, backward) / ceilings.bandwidth, case.operations(sizes, backward) / ceilings.rate)
        row[stage] = {
            "floor_ms": 1e3 * floor,
            "eager": interleaved(works, repeats),
            "graph": interleaved({who: as_graph(work) for who, work in works.items()}, repeats),
            "peak_mb": {who: peak_megabytes(work) for who, work in works.items()},
        }
    return row


def show(name: str, sizes: Sizes, row: Mapping[str, Any]) -> None:
    if "refused" in row:
        print(f"{name:12s} {sizes!s:24s} no time: {'; '.join(row['refused'])}", flush=True)
        return
    for stage in ("forward", "forward_backward"):
        part = row[stage]
        cells = [
            f"{who} {part['graph'][who].median:.3f} (eager {part['eager'][who].median:.2f}, {part['peak_mb'][who]:.0f} MB)"
            for who in part["graph"]
        ]
        reached = part["floor_ms"] / part["graph"]["ours"].median
        print(
            f"{name:12s} {sizes!s:24s} {stage:16s} floor {part['floor_ms']:.3f} ({reached:.0%})  {'  '.join(cells)}",
            flush=True,
        )


def cold_start(name: str, sizes: Sizes, dtype: torch.dtype, backend: str) -> dict[str, float]:
    """Seconds of the first forward + backward in a new process: with an empty kernel cache, then with the one it left."""
    program = (
        "import sys, time, torch; sys.path.insert(0, sys.argv[1]); from judge.cases import CASES, Sizes\n"
        "case, sizes = CASES[sys.argv[2]], Sizes(*map(int, sys.argv[3].split(',')))\n"
        "inputs = case.draw(sizes, getattr(torch, sys.argv[4]), 'cuda', 0); torch.cuda.synchronize(); start = time.time()\n"
        "o, _ = case.ours(inputs, backend=sys.argv[5]); torch.autograd.grad(o.sum(), list(inputs.values()))\n"
        "torch.cuda.synchronize(); print(time.time() - start)"
    )
    arguments = [str(Path(__file__).parent), name, ",".join(map(str, sizes)), str(dtype).split(".")[1], backend]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TRITON_CACHE_DIR": folder}
        run = partial(
            subprocess.run, [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
        )
        seconds = [float(run(env={**os.environ, **environment}).stdout) for _ in range(2)]
    return {"empty_cache_s": seconds[0], "warm_cache_s": seconds[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"ops, of {', '.join(CASES)}")
    parser.add_argument(
        "--sizes", action="append", help=f"B,T,H,K,V; may be repeated; {' and '.join(SIZES)} if not given"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--backend", default="auto", help="of our ops")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cold", action="store_true", help="also the first call from an empty kernel cache")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.only.split(",")) - set(CASES))
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}; choose from {', '.join(CASES)}")
    if not torch.cuda.is_available():
        parser.error("the kernels are judged on a CUDA device, and this machine has none")
    dtype = getattr(torch, arguments.dtype)
    ceilings = Ceilings.measure()
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {ceilings.bandwidth / 1e12:.2f} TB/s, bf16 product {ceilings.rate / 1e12:.0f} TFLOP/s")
    started, rows = time.time(), {}
    for name in arguments.only.split(","):
        for text in arguments.sizes or SIZES:
            sizes = Sizes(*map(int, text.split(",")))
            row = judge(name, sizes, dtype, arguments.backend, arguments.repeats, ceilings)
            if arguments.cold:
                row["cold_start"] = cold_start(name, sizes, dtype, arguments.backend)
            rows[f"{name} {text}"] = row
            show(name, sizes, row)
    output = arguments.output or RESULTS / f"kernels-{device.replace(' ', '-').lower()}.json"
    content = {
        **describe(), "device": device, "dtype": arguments.dtype, "backend": arguments.backend,
        "ceilings": ceilings._asdict(), "rows": rows,
    }  # fmt: skip
    write_json(output, content)
    print(f"written to {output} after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
