"""Whether the kernels give the same bits in every call: gradients of many calls with the same inputs, compared on a CUDA device.

    python -m fastweights_studies.measure.repeatability                       every op with kernels, 300 calls at two sizes
    python -m fastweights_studies.measure.repeatability --only gdn-write --calls 1000

A result that differs from call to call is a race: a missing barrier, or a copy into memory that is still read. Several of these
programs at once make races more likely. Writes studies/results/repeatability-<device>.json; exit code 1 where a call differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fastweights_studies.measure.environment import describe, file_suffix, write_json
from fastweights_studies.measure.host_time import NAMES
from fastweights_studies.measure.judge.cases import CASES, Sizes
from fastweights_studies.places import RESULTS

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help=f"ops, of {', '.join(NAMES)}")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("races show on a CUDA device, and this machine has none")
    device = torch.cuda.get_device_name()
    rows = {}
    for name in arguments.only.split(","):
        for sizes in SIZES:
            rows[f"{name} {sizes}"] = differing_calls(name, Sizes.read(sizes), arguments.calls, arguments.seed)
            print(f"{name:12s} {sizes:20s} {rows[f'{name} {sizes}'] or 'the same in every call'}", flush=True)
    output = arguments.output or RESULTS / f"repeatability-{file_suffix(device)}.json"
    write_json(output, {**describe(), "device": device, "calls": arguments.calls, "seed": arguments.seed, "rows": rows})
    raise SystemExit(1 if any(rows.values()) else 0)


if __name__ == "__main__":
    main()
