"""Runs the tests that need a GPU and those of kernels on it, and writes what passed, the worst errors and the versions.

    python -m fastweights_studies.measure.gpu_tests [arguments of pytest, such as -n 8 tests/gpu]
    python -m fastweights_studies.measure.gpu_tests tests/gpu/test_large_tensors.py
        in one process: these tests take the GPU's memory for themselves, those of several GPUs take all of them

With -n the processes are spread over the machine's GPUs, one GPU for each process.

Writes studies/results/gpu_tests.json. A run may be split by files: the files of tests that are not run again keep their
counts, with the origin of their own run. With -k or a single test nothing is written. An interrupted run (Ctrl-C, or `timeout -s
INT 300 python -m fastweights_studies.measure.gpu_tests`) writes what ran until then, and names the tests that did not run.
`--rest` runs these, or those of the files that are named, and adds them to the counts:

    python -m fastweights_studies.measure.gpu_tests --rest -n 8 tests/gpu/test_fused.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from fastweights.files import write_bytes
from fastweights.results.records import ResultsError, from_record, read_object, reading_fields
from fastweights_studies.measure.chosen_tests import DEVICES, FILE
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.places import RESULTS, ROOT, SOURCES
from fastweights_studies.record import Origin

RESULT = RESULTS / "gpu_tests.json"
COMPARED = ("values", "gradients")  # properties of a test: the error of either
FORMAT = 1


@dataclass(frozen=True)
class Counts:
    """Of the tests of one or more files."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


@dataclass(frozen=True)
class WorstError:
    """The largest relative error against float64 of an op: over its outputs and states ("values"), or "gradients"."""

    op: str
    backend: str
    dtype: str
    compared: str
    error: float


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """The files of tests whose last run this is, by their names in the report, and the worst errors of the run."""

    __test__ = False  # no test of pytest's
    origin: Origin
    files: Mapping[str, Counts]
    errors: tuple[WorstError, ...] = ()

    @property
    def counts(self) -> Counts:
        return sum(self.files.values(), Counts())


@dataclass(frozen=True, kw_only=True)
class GpuTests:
    """What the last run of every file found. No rows: it counts tests by file, and names those that failed or did not run."""

    runs: tuple[TestRun, ...] = ()
    not_run: tuple[str, ...] = ()  # as pytest names them
    failed_tests: tuple[str, ...] = ()  # as the report does

    @property
    def counts(self) -> Counts:
        return sum((run.counts for run in self.runs), Counts())


def write_tests(path: Path, tests: GpuTests) -> None:
    write_bytes(path, (json.dumps({"format": FORMAT, **dataclasses.asdict(tests)}, indent=1) + "\n").encode())


def read_tests(path: Path) -> GpuTests:
    """The result of earlier runs; an empty one where there is no file.

    Raises:
        ResultsError: the file is damaged or of another format.
    """
    if not path.exists():
        return GpuTests()
    content = read_object(path)
    if content.get("format") != FORMAT:
        raise ResultsError(f"result {path} is not of format {FORMAT}; delete that file to have it made again")
    with reading_fields(path):
        runs = tuple(
            TestRun(
                origin=from_record(Origin, run["origin"], path),
                files={name: from_record(Counts, counts, path) for name, counts in run["files"].items()},
                errors=tuple(from_record(WorstError, error, path) for error in run["errors"]),
            )
            for run in content["runs"]
        )
        return GpuTests(runs=runs, not_run=tuple(content["not_run"]), failed_tests=tuple(content["failed_tests"]))


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
    before: GpuTests,
    origin: Origin,
    chosen: Iterable[str] = (),
    rest: bool = False,
) -> GpuTests:
    """The earlier runs with this one: counts by file of tests, and the worst errors of the run.

    Args:
        before: the result of earlier runs. Those with files that did not run again stay, with the counts of these files.
        chosen: the tests that were to run, as pytest names them.
        rest: whether they are those that an earlier run left. The counts of their files in that run stay too.
    """
    files: dict[str, Counts] = {}
    worst: dict[tuple[str, str, str, str], float] = {}
    failed: list[str] = []
    ran = set()
    for case in suite.iter("testcase"):
        if "classname" not in case.attrib:  # of a test that an interrupt has ended
            continue
        file, how = case.attrib["classname"], outcome(case)
        name = f"{file}::{case.attrib['name']}"
        files[file] = files.get(file, Counts()) + Counts(**{how: 1})
        ran.add(name)
        if how == "failed":
            failed.append(name)
        recorded = {entry.attrib["name"]: entry.attrib["value"] for entry in case.iter("property")}
        for compared in COMPARED:
            if "op" in recorded and compared in recorded:
                subject = (recorded["op"], recorded["backend"], recorded["dtype"], compared)
                worst[subject] = max(worst.get(subject, 0.0), float(recorded[compared]))
    failed += [name for name in before.failed_tests if rest or name.partition("::")[0] not in files]
    again = () if rest else files
    runs = [
        dataclasses.replace(run, files={name: counts for name, counts in run.files.items() if name not in again})
        for run in before.runs
    ]
    runs.append(
        TestRun(
            origin=origin,
            files=dict(sorted(files.items())),
            errors=tuple(WorstError(*subject, error) for subject, error in worst.items()),
        )
    )
    left = sorted(test for test in {*before.not_run, *chosen} if named_in_report(test) not in ran)
    kept = tuple(run for run in runs if run.files)
    return GpuTests(runs=kept, not_run=tuple(left), failed_tests=tuple(sorted(failed)))


def left_by(before: GpuTests, files: str, named: Sequence[str] = ()) -> tuple[str, ...]:
    """The tests that the last run left, of the files `named` or of all, where the ops' files are those that it had."""
    if not before.runs or before.runs[-1].origin.versions.get("files") != files:
        return ()
    return tuple(test for test in before.not_run if not named or test.partition("::")[0] in named)


def visible_devices() -> str:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES has them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))


def main() -> None:
    origin = describe(find_gpu(), transformers=transformers.__version__)
    arguments, rest = [argument for argument in sys.argv[1:] if argument != "--rest"], "--rest" in sys.argv
    named = [argument for argument in arguments if rest and argument.endswith(".py")]
    arguments = [argument for argument in arguments if argument not in named]
    left = left_by(read_tests(RESULT), origin.versions["files"], named) if rest else ()
    if rest and not left:
        raise SystemExit(
            f"--rest needs tests that an interrupted run of the same ops has left, and {RESULT} names none"
            + (f" of {' '.join(named)}" if named else "")
        )
    with tempfile.TemporaryDirectory() as folder:
        report, chosen = Path(folder, "report.xml"), Path(folder, "chosen.json")
        command = [sys.executable, "-m", "pytest", "-m", "gpu or kernels", f"--junitxml={report}", *arguments, *left]
        path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
        # The references run on the CPU, in as many processes as pytest is given.
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": path,
            FILE: str(chosen),
            DEVICES: visible_devices(),
        }
        code = run([*command, "-p", "fastweights_studies.measure.chosen_tests"], environment)
        if not report.exists():
            raise SystemExit("pytest ended before it wrote a report; nothing was written")
        suite = ElementTree.parse(report).getroot()
        wanted = json.loads(chosen.read_text()) if chosen.exists() else ()  # interrupted before
    if any(argument == "-k" or "::" in argument for argument in arguments):
        sys.exit(code)
    write_tests(
        RESULT, read_report(suite, read_tests(RESULT), origin, wanted, rest)
    )  # another may have written it meanwhile
    print(f"written to {RESULT}")
    sys.exit(code)


if __name__ == "__main__":
    main()
