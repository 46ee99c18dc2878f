"""Runs the tests that need a GPU and those of kernels on it, and writes what passed, the worst errors and the versions.

    python benchmarks/gpu_tests.py [arguments of pytest, such as -n 8 tests/gpu]
    python benchmarks/gpu_tests.py tests/gpu/test_large_tensors.py      one process: these take the GPU's memory for themselves

Writes benchmarks/results/gpu_tests.json. A run may be split by files: as long as the Python files of the ops stay the same, the
files of tests that are not run again keep their counts. With -k or a single test nothing is written. An interrupted run (Ctrl-C,
or `timeout -s INT 300 python benchmarks/gpu_tests.py`) writes what ran until then, and names the files of these tests. A later
run of such a file that ends takes it off the list. Files of which no test ran are not named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import describe, write_json

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
COUNTED = ("passed", "failed", "skipped")
WORST = "worst relative errors against float64"


def run(command: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """The exit code, and whether the run was interrupted. pytest gets one interrupt, which lets it write its report."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(), False
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait(), True


def outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def read_report(suite: ElementTree.Element, before: Mapping[str, Any], interrupted: bool = False) -> dict[str, Any]:
    """Counts per file of tests, and the worst errors by op, backend, and dtype with what was compared. before: the result of an
    earlier run. The counts of its files that did not run again stay, and so do its worst errors. Of an interrupted run all files
    are named: which of them had ended is not known."""
    files: dict[str, dict[str, int]] = {}
    worst: dict[str, dict[str, dict[str, float]]] = deepcopy(before.get(WORST, {}))
    failed: list[str] = []
    for case in suite.iter("testcase"):
        if "classname" not in case.attrib:  # of a test that an interrupt has ended
            continue
        counts = files.setdefault(case.attrib["classname"], dict.fromkeys(COUNTED, 0))
        how = outcome(case)
        counts[how] += 1
        if how == "failed":
            failed.append(f"{case.attrib['classname']}::{case.attrib['name']}")
        recorded = {entry.attrib["name"]: entry.attrib["value"] for entry in case.iter("property")}
        if "op" in recorded:
            errors = worst.setdefault(recorded.pop("op"), {}).setdefault(recorded.pop("backend"), {})
            for what, error in recorded.items():
                errors[what] = max(errors.get(what, 0.0), float(error))
    failed += [name for name in before.get("failed tests", ()) if name.partition("::")[0] not in files]
    unfinished = set(before.get("interrupted", ())) - set(files)
    if interrupted:
        unfinished |= set(files)
    files = {**before.get("files", {}), **files}
    totals = {what: sum(counts[what] for counts in files.values()) for what in COUNTED}
    return {
        **totals,
        "interrupted": sorted(unfinished),
        "failed tests": sorted(failed),
        "files": dict(sorted(files.items())),
        WORST: worst,
    }


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("these tests need an NVIDIA GPU, and torch sees none")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu or kernels", f"--junitxml={report}", *sys.argv[1:]]
        # The references run on the CPU, in as many processes as pytest is given.
        code, interrupted = run(command, {"OMP_NUM_THREADS": "1", **os.environ})
        suite = ElementTree.parse(report).getroot()
    if any(argument == "-k" or "::" in argument for argument in sys.argv[1:]):
        sys.exit(code)
    where = describe()
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if before.get("source") != where["source"]:
        before = {}
    content = {
        **where, "device": torch.cuda.get_device_name(), "transformers": transformers.__version__,
        **read_report(suite, before, interrupted),
    }  # fmt: skip
    write_json(RESULT, content)
    print(f"written to {RESULT}")
    sys.exit(code)


if __name__ == "__main__":
    main()
