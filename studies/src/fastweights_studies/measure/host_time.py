"""Processor time of the kernels' ops: of all that is done around the kernels, which are replaced by nothing. No GPU is needed.

    python -m fastweights_studies.measure.host_time
        every op of the judge, writes studies/results/host_time.json
    python -m fastweights_studies.measure.host_time --against CHECKOUT
        beside another checkout, in turns; writes studies/results/host_time_against.json

With --against, exit code 1 says that an op takes more than --tolerance times the other checkout's time.

What it leaves out: the driver's part of a launch, torch's allocator on a GPU, and the thread in which autograd runs there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fastweights_studies.measure.environment import describe, describe_checkout
from fastweights_studies.measure.judge.cases import CASES
from fastweights_studies.measure.judge.host import SIZES, measure_host
from fastweights_studies.measure.judge.records import sizes_column
from fastweights_studies.measure.rows import make_rows, replace_rows
from fastweights_studies.places import RESULTS, ROOT, SOURCES

TASK, AGAINST = "host_time", "host_time_against"
NAMES = list(CASES)
TURNS = 3
TOLERANCE = 1.03  # of --against: largest ratio
PROGRAM = """
import json, sys
from fastweights_studies.measure.judge.host import measure_host
print(json.dumps({name: measure_host(name) for name in sys.argv[1:]}))
"""


def measure_all(names: Sequence[str], output: Path) -> None:
    origin, rows = describe(), []
    for name in names:
        found = measure_host(name)
        print(f"{name:20s} " + "  ".join(f"{what} {value:6.1f}" for what, value in found.items()), flush=True)
        rows += make_rows(TASK, origin, found, column={"op": name, **sizes_column(SIZES)})
    replace_rows(output, rows)
    print(f"written to {output}")


def compare(base: Path, names: Sequence[str], tolerance: float, output: Path) -> bool:
    """Both checkouts in turns; the least time of each. Whether ours are within the tolerance."""
    roots = {"after": ROOT, "before": base.resolve()}
    least: dict[str, dict[str, dict[str, float]]] = {which: {} for which in roots}
    for _ in range(TURNS):
        for which, root in roots.items():
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(SOURCES)])}
            command = [sys.executable, "-c", PROGRAM, *names]
            done = subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
            for name, found in json.loads(done.stdout).items():
                best = least[which].setdefault(name, found)
                least[which][name] = {what: min(value, best[what]) for what, value in found.items()}
    rows, worse = [], []
    for which, root in roots.items():
        origin = describe_checkout(root)
        for name, found in least[which].items():
            column = {"op": name, **sizes_column(SIZES), "checkout": which}
            rows += make_rows(AGAINST, origin, found, column=column)
    for name, found in least["after"].items():
        for what, value in found.items():
            before = least["before"][name][what]
            worse += [f"{name} {what}"] if value / before > tolerance else []
            print(f"{name:20s} {what:20s} {value:6.1f} us, base {before:6.1f}, ratio {value / before:.3f}")
    replace_rows(output, rows)
    print(f"{len(worse)} over {tolerance}: {', '.join(worse) or 'none'}; written to {output}")
    return not worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"ops, of {', '.join(NAMES)}")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of --against: largest ratio")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else NAMES
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"--only names {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    if arguments.against:
        output = arguments.output or RESULTS / "host_time_against.json"
        raise SystemExit(0 if compare(arguments.against, names, arguments.tolerance, output) else 1)
    measure_all(names, arguments.output or RESULTS / "host_time.json")


if __name__ == "__main__":
    main()
