"""What `make test-latest` installs and reports."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("tomllib")  # Python 3.11

from . import latest  # noqa: E402


def test_names_of_dependencies_without_bounds():
    asked = latest.read_requirements()
    assert {"torch", "transformers", "peft", "accelerate", "lm-eval[hf,longbench,ruler]"} <= set(asked)
    assert asked["transformers"].startswith("transformers>=") and "tomli" not in asked
    assert latest.normalized("lm_Eval") == "lm-eval"


def test_packages_that_cannot_be_installed_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    with pytest.raises(SystemExit, match="2"):
        latest.install(tmp_path, ["a-package-that-is-nowhere"])
    assert "the newest packages cannot be installed here: ERROR" in capsys.readouterr().err


def test_failed_tests_and_errors_are_listed(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a.b" name="good"/><testcase classname="a.b" name="bad">'
        '<failure message="assert 1 == 2&#10;more"/></testcase><testcase classname="a.c" name="broken"><error message=""/>'
        "</testcase></testsuite></testsuites>"
    )
    assert latest.failed_tests(report) == ["a.b::bad: assert 1 == 2", "a.c::broken: "]
