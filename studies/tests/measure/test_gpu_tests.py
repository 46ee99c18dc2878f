"""The report of tests on a GPU: counted per file, and continued by another run."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from fastweights_studies.measure import chosen_tests
from fastweights_studies.measure.gpu_tests import Counts, GpuTests, left_by, read_report, read_tests, write_tests
from fastweights_studies.record import Origin

from fastweights.results.records import ResultsError

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="x"><properties>
  <property name="op" value="mesa"/><property name="backend" value="triton"/><property name="dtype" value="bfloat16"/>
  <property name="values" value="{error}"/>
</properties></testcase>
<testcase classname="tests.gpu.test_a" name="y"><failure message="wrong"/></testcase>
<testcase classname="tests.gpu.test_{second}" name="z"><skipped message="no"/></testcase>
<testcase time="0.1"/>
</testsuite></testsuites>"""


def report(error: float, second: str) -> ElementTree.Element:
    return ElementTree.fromstring(REPORT.format(error=error, second=second))


def origin(device: str, commit: str) -> Origin:
    return Origin(device=device, versions={"files": commit}, commit=commit, date="2026-01-02T00:00:00")


FIRST, SECOND = origin("one", "abc"), origin("another", "def")


def test_files_that_ran_again_are_counted_once_and_keep_where_they_ran() -> None:
    first = read_report(report(0.002, "b"), GpuTests(), FIRST)
    assert first.counts == Counts(passed=1, failed=1, skipped=1)
    again = read_report(report(0.001, "c"), first, SECOND)
    assert again.counts == Counts(passed=1, failed=1, skipped=2)
    assert [(run.origin, list(run.files)) for run in again.runs] == [
        (FIRST, ["tests.gpu.test_b"]), (SECOND, ["tests.gpu.test_a", "tests.gpu.test_c"]),
    ]  # fmt: skip
    assert first.failed_tests == again.failed_tests == ("tests.gpu.test_a::y",)
    rest = ElementTree.fromstring(REPORT.format(error=0.001, second="b").replace("test_a", "test_d"))
    assert read_report(rest, first, SECOND).failed_tests == ("tests.gpu.test_a::y", "tests.gpu.test_d::y")
    whole = read_report(report(0.001, "b"), first, SECOND)
    assert [run.origin for run in whole.runs] == [SECOND]
    errors = [(e.op, e.backend, e.dtype, e.compared, e.error) for run in again.runs for e in run.errors]
    assert errors == [("mesa", "triton", "bfloat16", "values", error) for error in (0.002, 0.001)]
    assert [error.error for error in whole.runs[0].errors] == [0.001]


def test_an_interrupted_run_names_what_it_left_and_the_rest_is_added() -> None:
    chosen = [
        "tests/gpu/test_a.py::x",
        "tests/gpu/test_a.py::w[b-1::2]",
        "tests/gpu/test_b.py::z",
        "tests/gpu/test_c.py::v",
    ]
    first = read_report(report(0.002, "b"), GpuTests(), FIRST, chosen)
    assert first.not_run == ("tests/gpu/test_a.py::w[b-1::2]", "tests/gpu/test_c.py::v")
    rest = (
        """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="w[b-1::2]"/></testsuite></testsuites>"""
    )
    again = read_report(ElementTree.fromstring(rest), first, SECOND, first.not_run, rest=True)
    assert [run.files.get("tests.gpu.test_a") for run in again.runs] == [Counts(1, 1, 0), Counts(1, 0, 0)]
    assert again.counts == Counts(passed=2, failed=1, skipped=1)
    assert again.not_run == ("tests/gpu/test_c.py::v",) and again.failed_tests == ("tests.gpu.test_a::y",)
    assert left_by(again, "def") == again.not_run and left_by(again, "abc") == left_by(GpuTests(), "def") == ()
    assert left_by(first, "abc", ["tests/gpu/test_a.py"]) == first.not_run[:1]


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu_tests.json"
    assert read_tests(path) == GpuTests()
    tests = read_report(report(0.002, "b"), GpuTests(), FIRST, ["tests/gpu/test_c.py::v"])
    write_tests(path, tests)
    assert read_tests(path) == tests
    path.write_text('{"passed": 1, "runs": []}')
    with pytest.raises(ResultsError, match="is not of format 1; delete that file"):
        read_tests(path)


@pytest.mark.slow
def test_processes_are_spread_over_the_gpus(tmp_path: Path) -> None:
    Path(tmp_path, "test_seen.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def test_device():\n"
        "    name = os.environ['PYTEST_XDIST_WORKER'] + ' ' + os.environ['CUDA_VISIBLE_DEVICES']\n"
        "    Path(name).touch()\n"
        "test_again = test_another = test_device\n"
    )
    environment = {**os.environ, chosen_tests.DEVICES: "2,5", chosen_tests.FILE: str(tmp_path / "chosen.json")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "-p", chosen_tests.__name__, "test_seen.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert {"gw0 2", "gw1 5", "gw2 2"} <= {path.name for path in tmp_path.iterdir()}
