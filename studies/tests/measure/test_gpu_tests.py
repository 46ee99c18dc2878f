"""The report of tests on a GPU: counted per file, and continued by another run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from fastweights_studies.measure.gpu_tests import NOT_RUN, WORST, left_by, read_report

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="x"><properties>
  <property name="op" value="mesa"/><property name="backend" value="triton"/><property name="bfloat16 values" value="{error}"/>
</properties></testcase>
<testcase classname="tests.gpu.test_a" name="y"><failure message="wrong"/></testcase>
<testcase classname="tests.gpu.test_{second}" name="z"><skipped message="no"/></testcase>
<testcase time="0.1"/>
</testsuite></testsuites>"""


FIRST = {"device": "one", "commit": "abc", "source": "abc"}
SECOND = {"device": "another", "commit": "def", "source": "def"}


def test_files_that_ran_again_are_counted_once_and_keep_where_they_ran() -> None:
    first = read_report(ElementTree.fromstring(REPORT.format(error=0.002, second="b")), {}, FIRST)
    assert (first["passed"], first["failed"], first["skipped"]) == (1, 1, 1)
    again = read_report(ElementTree.fromstring(REPORT.format(error=0.001, second="c")), first, SECOND)
    assert (again["passed"], again["failed"], again["skipped"]) == (1, 1, 2)
    assert [(run["device"], run["commit"], list(run["files"])) for run in again["runs"]] == [
        ("one", "abc", ["tests.gpu.test_b"]), ("another", "def", ["tests.gpu.test_a", "tests.gpu.test_c"]),
    ]  # fmt: skip
    assert first["failed tests"] == again["failed tests"] == ["tests.gpu.test_a::y"]
    rest = ElementTree.fromstring(REPORT.format(error=0.001, second="b").replace("test_a", "test_d"))
    assert read_report(rest, first, SECOND)["failed tests"] == ["tests.gpu.test_a::y", "tests.gpu.test_d::y"]
    whole = read_report(ElementTree.fromstring(REPORT.format(error=0.001, second="b")), first, SECOND)
    assert [run["device"] for run in whole["runs"]] == ["another"]
    errors = [{"mesa": {"triton": {"bfloat16 values": error}}} for error in (0.002, 0.001)]
    assert [run[WORST] for run in again["runs"]] == errors and [run[WORST] for run in whole["runs"]] == errors[1:]


def test_an_interrupted_run_names_what_it_left_and_the_rest_is_added() -> None:
    chosen = [
        "tests/gpu/test_a.py::x",
        "tests/gpu/test_a.py::w[b-1::2]",
        "tests/gpu/test_b.py::z",
        "tests/gpu/test_c.py::v",
    ]
    first = read_report(ElementTree.fromstring(REPORT.format(error=0.002, second="b")), {}, FIRST, chosen)
    assert first[NOT_RUN] == ["tests/gpu/test_a.py::w[b-1::2]", "tests/gpu/test_c.py::v"]
    assert first["interrupted"] == ["tests.gpu.test_a", "tests.gpu.test_c"]
    rest = (
        """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="w[b-1::2]"/></testsuite></testsuites>"""
    )
    again = read_report(ElementTree.fromstring(rest), first, SECOND, first[NOT_RUN], rest=True)
    assert [run["files"].get("tests.gpu.test_a") for run in again["runs"]] == [
        {"passed": 1, "failed": 1, "skipped": 0}, {"passed": 1, "failed": 0, "skipped": 0},
    ]  # fmt: skip
    assert (again["passed"], again["failed"], again["skipped"]) == (2, 1, 1)
    assert again[NOT_RUN] == ["tests/gpu/test_c.py::v"] and again["failed tests"] == ["tests.gpu.test_a::y"]
    assert left_by(again, "def") == again[NOT_RUN] and left_by(again, "abc") == left_by({}, "def") == []
