"""The report of tests on a GPU: counted per file, and continued by another run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from gpu_tests import NOT_RUN, WORST, read_report

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="x"><properties>
  <property name="op" value="mesa"/><property name="backend" value="triton"/><property name="bfloat16 values" value="{error}"/>
</properties></testcase>
<testcase classname="tests.gpu.test_a" name="y"><failure message="wrong"/></testcase>
<testcase classname="tests.gpu.test_{second}" name="z"><skipped message="no"/></testcase>
<testcase time="0.1"/>
</testsuite></testsuites>"""


def test_files_that_ran_again_are_counted_once() -> None:
    first = read_report(ElementTree.fromstring(REPORT.format(error=0.002, second="b")), {})
    assert (first["passed"], first["failed"], first["skipped"]) == (1, 1, 1)
    again = read_report(ElementTree.fromstring(REPORT.format(error=0.001, second="c")), first)
    assert (again["passed"], again["failed"], again["skipped"]) == (1, 1, 2)
    assert list(again["files"]) == ["tests.gpu.test_a", "tests.gpu.test_b", "tests.gpu.test_c"]
    assert first["failed tests"] == again["failed tests"] == ["tests.gpu.test_a::y"]
    rest = ElementTree.fromstring(REPORT.format(error=0.001, second="b").replace("test_a", "test_d"))
    assert read_report(rest, first)["failed tests"] == ["tests.gpu.test_a::y", "tests.gpu.test_d::y"]
    assert again[WORST] == {"mesa": {"triton": {"bfloat16 values": 0.002}}}


def test_an_interrupted_run_names_what_it_left_and_the_rest_is_added() -> None:
    chosen = [
        "tests/gpu/test_a.py::x",
        "tests/gpu/test_a.py::w[b-1::2]",
        "tests/gpu/test_b.py::z",
        "tests/gpu/test_c.py::v",
    ]
    first = read_report(ElementTree.fromstring(REPORT.format(error=0.002, second="b")), {}, chosen)
    assert first[NOT_RUN] == ["tests/gpu/test_a.py::w[b-1::2]", "tests/gpu/test_c.py::v"]
    assert first["interrupted"] == ["tests.gpu.test_a", "tests.gpu.test_c"]
    rest = (
        """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="w[b-1::2]"/></testsuite></testsuites>"""
    )
    again = read_report(ElementTree.fromstring(rest), first, first[NOT_RUN], rest=True)
    assert again["files"]["tests.gpu.test_a"] == {"passed": 2, "failed": 1, "skipped": 0}
    assert again[NOT_RUN] == ["tests/gpu/test_c.py::v"] and again["failed tests"] == ["tests.gpu.test_a::y"]
