"""Whether the kernels give the same bits in every call: gradients of many calls with the same inputs, compared on a CUDA device.

    python -m fastweights_studies.measure.repeatability    every op with kernels, 300 calls at two sizes
    python -m fastweights_studies.measure.repeatability --only gdn-write --calls 1000

A result that differs from call to call is a race: a missing barrier, or a copy into memory that is still read. Several of these
programs at once make races more likely. Writes studies/results/repeatability-<device>.json; exit code 1 where a call differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.measure.judge.records import measured_with_an_op, sizes_column
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "repeatability"
NAMES = list(CASES)
SIZES = ("1,8192,8,128,128", "4,2048,8,128,128")


def differing_calls(name: str, sizes: Sizes, calls: int, seed: int) -> dict[str, int]:
    """In how many calls the gradient of each input differs from that of the first call."""
    case = CASES[name]
    inputs = case.draw(sizes, torch.bfloat16, "cuda", seed)
    do = torch.randn_like(inputs["v"])
    first: tuple[torch.Tensor, ...] | None = None
    found: dict[str, int] = {}
    for _ in range(calls + 1):
        o, _ = case.ours(inputs, "triton")
        grads = torch.autograd.grad(o, list(inputs.values()), do)
        if first is None:
            first = grads
            continue
        for what, a, b in zip(inputs, first, grads):
            if not torch.equal(a, b):
                found[what] = found.get(what, 0) + 1
    return found


def make_call_rows(op: str, sizes: Sizes, calls: int, seed: int, found: dict[str, int], origin: Origin) -> list[Row]:
    """How many results differ between calls, and for each of these in how many calls it does."""
    shared = {"op": op, **sizes_column(sizes), "calls": calls}
    rows = make_rows(TASK, origin, {"differing_results": len(found)}, column=shared, seed=seed)
    for result, count in found.items():
        rows += make_rows(
            TASK, origin, {"differing_calls": count}, column={**shared, "result": f"d{result}"}, seed=seed
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help=f"ops, of {', '.join(NAMES)}")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device, differs = find_gpu(), False
    output, origin = arguments.output or name_file(RESULTS, "repeatability", device), describe(device)
    for name in arguments.only.split(","):
        for text in SIZES:
            sizes = Sizes.read(text)
            found = differing_calls(name, sizes, arguments.calls, arguments.seed)
            differs |= bool(found)
            print(f"{name:12s} {text:20s} {found or 'the same in every call'}", flush=True)
            rows = make_call_rows(name, sizes, arguments.calls, arguments.seed, found, origin)
            replace_rows(output, rows, measured_with_an_op)
    raise SystemExit(1 if differs else 0)


if __name__ == "__main__":
    main()
