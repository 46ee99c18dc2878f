"""Runs the tests that need a GPU and those of kernels on it, and writes what passed, the worst errors and the versions.

    python -m fastweights_studies.measure.gpu_tests [arguments of pytest, such as -n 8 tests/gpu]
    python -m fastweights_studies.measure.gpu_tests tests/gpu/test_large_tensors.py  one process: these take the GPU's memory for themselves

Writes studies/results/gpu_tests.json. A run may be split by files: the files of tests that are not run again keep their
counts, with the device, the time, the commit and the hash of the ops (`source`) of their own run. With -k or a single test
nothing is written. An interrupted run (Ctrl-C, or `timeout -s INT 300 python -m fastweights_studies.measure.gpu_tests`) writes what
ran until then, and names the tests that did not run. `--rest` runs these, and adds them to the counts:

    python -m fastweights_studies.measure.gpu_tests --rest -n 8
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from fastweights_studies.measure.chosen_tests import FILE
from fastweights_studies.measure.environment import describe, write_json
from fastweights_studies.places import RESULTS, ROOT, SOURCES

RESULT = RESULTS / "gpu_tests.json"
COUNTED = ("passed", "failed", "skipped")
NOT_RUN = "not run"
WORST = "worst relative errors against float64"


def run(command: list[str], environment: dict[str, str]) -> int:
    """The exit code. pytest gets one interrupt, which lets it write its report."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait()


def outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def named_in_report(test: str) -> str:
    """A test by the names that the report has: "tests/gpu/test_a.py::x" is "tests.gpu.test_a::x"."""
    place, *parameters = test.partition("[")
    file, *inside, name = place.split("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *inside]) + "::" + name + "".join(parameters)


def read_report(
    suite: ElementTree.Element,
    before: Mapping[str, Any],
    where: Mapping[str, Any],
    chosen: Iterable[str] = (),
    rest: bool = False,
) -> dict[str, Any]:
    """Counts and the worst errors per run: counts by file of tests, errors by op, backend, and dtype with what was compared.

    Args:
        before: the result of earlier runs. Those with files that did not run again stay, with the counts of these files.
        where: the device, the time, the commit and the versions of this run.
        chosen: the tests that were to run, as pytest names them.
        rest: whether they are those that an earlier run left. The counts of their files in that run stay too.
    """
    files: dict[str, dict[str, int]] = {}
    worst: dict[str, dict[str, dict[str, float]]] = {}
    failed: list[str] = []
    ran = set()
    for case in suite.iter("testcase"):
        if "classname" not in case.attrib:  # of a test that an interrupt has ended
            continue
        counts = files.setdefault(case.attrib["classname"], dict.fromkeys(COUNTED, 0))
        how, name = outcome(case), f"{case.attrib['classname']}::{case.attrib['name']}"
        counts[how] += 1
        ran.add(name)
        if how == "failed":
            failed.append(name)
        recorded = {entry.attrib["name"]: entry.attrib["value"] for entry in case.iter("property")}
        if "op" in recorded:
            errors = worst.setdefault(recorded.pop("op"), {}).setdefault(recorded.pop("backend"), {})
            for what, error in recorded.items():
                errors[what] = max(errors.get(what, 0.0), float(error))
    failed += [name for name in before.get("failed tests", ()) if rest or name.partition("::")[0] not in files]
    again = () if rest else files
    runs = [
        {**run, "files": {name: counts for name, counts in run["files"].items() if name not in again}}
        for run in before.get("runs", ())
    ]
    runs = [run for run in [*runs, {**where, "files": dict(sorted(files.items())), WORST: worst}] if run["files"]]
    totals = {what: sum(counts[what] for run in runs for counts in run["files"].values()) for what in COUNTED}
    left = sorted(test for test in {*before.get(NOT_RUN, ()), *chosen} if named_in_report(test) not in ran)
    return {
        **totals,
        "interrupted": sorted({named_in_report(test).partition("::")[0] for test in left}),
        NOT_RUN: left,
        "failed tests": sorted(failed),
        "runs": runs,
    }


def earlier() -> dict[str, Any]:
    """The result of earlier runs."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def left_by(before: Mapping[str, Any], source: str) -> list[str]:
    """The tests that the last run left, where the ops are those that it had."""
    same = before.get("runs") and before["runs"][-1]["source"] == source
    return before[NOT_RUN] if same else []


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("these tests need an NVIDIA GPU, and torch sees none")
    where = {**describe(), "device": torch.cuda.get_device_name(), "transformers": transformers.__version__}
    arguments, rest = [argument for argument in sys.argv[1:] if argument != "--rest"], "--rest" in sys.argv
    left = left_by(earlier(), where["source"]) if rest else []
    if rest and not left:
        raise SystemExit(
            f"--rest needs tests that an interrupted run of the same ops has left, and {RESULT} names none"
        )
    with tempfile.TemporaryDirectory() as folder:
        report, chosen = Path(folder, "report.xml"), Path(folder, "chosen.json")
        command = [sys.executable, "-m", "pytest", "-m", "gpu or kernels", f"--junitxml={report}", *arguments, *left]
        path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
        # The references run on the CPU, in as many processes as pytest is given.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, FILE: str(chosen)}
        code = run([*command, "-p", "fastweights_studies.measure.chosen_tests"], environment)
        if not report.exists():
            raise SystemExit("pytest ended before it wrote a report; nothing was written")
        suite = ElementTree.parse(report).getroot()
        wanted = json.loads(chosen.read_text()) if chosen.exists() else ()  # interrupted before
    if any(argument == "-k" or "::" in argument for argument in arguments):
        sys.exit(code)
    write_json(RESULT, read_report(suite, earlier(), where, wanted, rest))  # another run may have written it meanwhile
    print(f"written to {RESULT}")
    sys.exit(code)


if __name__ == "__main__":
    main()
