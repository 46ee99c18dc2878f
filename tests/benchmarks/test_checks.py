"""The correctness run: what it covers, and that it finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import checks
from judge.cases import CASES, Sizes
from judge.checks import PACKED, Combination, combinations
from judge.verdict import DRAWS

SMALL = Sizes(B=2, T=70, H=2, K=16, V=16, HV=4)
ROOT = Path(__file__).parents[2]


def test_combinations_cover_what_they_should() -> None:
    every = combinations()
    assert {63, 64, 65, 1000, 8192} <= {what.sizes.T for what in every}
    heads = {(16, 16), (64, 64), (96, 192), (100, 100), (128, 128), (256, 256)}
    assert heads <= {(what.sizes.K, what.sizes.V) for what in every}
    assert {"bfloat16", "float16", "float32"} == {what.dtype for what in every}
    assert {"usual", "none", "forgetting", "strong"} == {what.decay for what in every}
    assert any(what.packed for what in every) and any(what.sizes.HV > what.sizes.H for what in every)
    assert len(set(map(str, every))) == len(every)


@pytest.mark.parametrize("name", CASES)
def test_the_torch_form_passes(name: str) -> None:
    packed = Sizes(B=1, T=sum(PACKED), H=2, K=16, V=16)
    for what in (Combination(SMALL), Combination(packed, "float32", "forgetting", packed=True)):
        row = checks.check(name, what, "cpu", "torch", 0)
        assert row["failures"] == []
        assert row["errors"].keys() >= {"o", "dq", "dv", *CASES[name].states, *(f"d{s}" for s in CASES[name].states)}


def broken_row(monkeypatch: pytest.MonkeyPatch, change: Any) -> dict[str, Any]:
    """Of linear attention whose (o, S) go through `change`, in the checked calls alone."""
    case = CASES["simple_gla"]
    plain = case.op

    def op(*, backend: str, **arguments: Any) -> Any:
        o, S = plain(**arguments, backend="torch")
        return change(o, S) if backend == "auto" else (o, S)

    monkeypatch.setitem(checks.CASES, "simple_gla", replace(case, op=op))
    ((_, row),) = checks.check_group("simple_gla", [Combination(SMALL)], "cpu", "auto", 0)
    return row


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[str]:
    return broken_row(monkeypatch, change)["failures"]


def test_a_wrong_output_state_or_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [text.split()[0] for text in broken(monkeypatch, lambda o, S: (o + 0.02 * o.detach(), S))] == ["o"]
    assert [text.split()[0] for text in broken(monkeypatch, lambda o, S: (o, S + 0.02 * S.detach()))] == ["S"]
    found = broken(monkeypatch, lambda o, S: (1.05 * o - 0.05 * o.detach(), S))
    assert {text.split()[0] for text in found} >= {"dq", "dv"} and not any(text.startswith("o ") for text in found)


def test_one_bad_draw_asks_for_more_and_many_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of S over twice the twin's, within the budget or not."""

    def once(error: float) -> Any:
        calls = []

        def change(o: Any, S: Any) -> Any:
            calls.append(o)
            return o, S + error * S.detach() if len(calls) == 1 else S

        return change

    row = broken_row(monkeypatch, once(0.0045))
    assert row["draws"] == DRAWS and row["failures"] == []
    row = broken_row(monkeypatch, once(0.009))
    assert row["draws"] == DRAWS and [text.split()[0] for text in row["failures"]] == ["S"]
    assert row["errors"]["S"] < 5e-3 and "budget" in row["failures"][0]
    row = broken_row(monkeypatch, lambda o, S: (o, S + 0.0045 * S.detach()))
    assert row["draws"] == DRAWS and [text.split()[0] for text in row["failures"]] == ["S"]
    assert "twin" in row["failures"][0]
    assert broken_row(monkeypatch, lambda o, S: (o, S))["draws"] == 1


def test_differing_runs_and_exceptions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "two runs differ in S" in broken(monkeypatch, lambda o, S: (o, S + 1e-5 * torch.rand(())))

    def fails(o: Any, S: Any) -> Any:
        raise RuntimeError("no such kernel")

    assert "RuntimeError: no such kernel" in broken(monkeypatch, fails)[0]


def test_command_writes_a_file_and_fails_with_a_failure(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/kernels.py",
        "--check",
        "--device",
        "cpu",
        "--backend",
        "torch",
        "--jobs",
        "1",
    ]
    command += ["--only", "linear,gdn", "--combination", "(2,1,8,64,64)", "--results", str(tmp_path), "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "2 passed, 0 failed" in done.stdout.splitlines()[-1]
    content = json.loads((tmp_path / "kernel-checks-cpu.json").read_text())
    assert len(content["rows"]) == 2 and content["worst"]["gdn"]["half"]["o"] < 5e-3
