"""Device time, memory and host time of the judge's ops beside another checkout, on one GPU and within five minutes.

    git worktree add /tmp/before COMMIT
    python -m fastweights_studies.measure.against /tmp/before

Kernels of both checkouts are compiled first, --jobs processes at a time. Then every op is timed at one size as
`measure.kernels --against` does, in turns, and after that the host's part as `measure.host_time --against` does. The files of
the results are theirs, in --results. Exit code 1 says that an op takes more than --tolerance times the other checkout's device
time, memory or host time. Without a GPU only the host time is measured.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

from fastweights_studies.measure import host_time, kernels
from fastweights_studies.measure.judge.against import warm_checkouts
from fastweights_studies.places import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of the repository, may be from before the split of the studies")
    parser.add_argument("--only", default=",".join(host_time.NAMES), help="ops, comma-separated")
    parser.add_argument("--sizes", action="append", help=f"B,T,H,K,V; may be repeated; {kernels.SIZES[0]} if not given")
    parser.add_argument("--tolerance", type=float, default=kernels.TOLERANCE, help="largest ratio")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16), help="processes that compile")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if not (asked.checkout / "fastweights").is_dir():
        parser.error(f"checkout must hold the folder fastweights, got {asked.checkout}")
    names, sizes = asked.only.split(","), asked.sizes or kernels.SIZES[:1]
    if unknown := sorted(set(names) - set(host_time.NAMES)):
        parser.error(f"--only names {', '.join(unknown)}; choose from {', '.join(host_time.NAMES)}")
    began, within = time.perf_counter(), True
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        warm_checkouts(asked.checkout, names, sizes, "bfloat16", asked.jobs)
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        within = kernels.compare_checkouts(
            asked.checkout, names, sizes, "bfloat16", asked.tolerance, asked.results, device
        )
    output = asked.results / "host_time_against.json"
    within &= host_time.compare(asked.checkout, names, asked.tolerance, output)
    print(f"{time.perf_counter() - began:.0f} s")
    raise SystemExit(0 if within else 1)


if __name__ == "__main__":
    main()
