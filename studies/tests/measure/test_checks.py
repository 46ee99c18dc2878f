"""The correctness run: what it covers, and that it finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastweights_studies.measure.judge import checks, measuring, records
from fastweights_studies.measure.judge.accuracy import over_budget
from fastweights_studies.measure.judge.cases import CASES, Case, Sizes
from fastweights_studies.measure.judge.checks import PACKED, Combination, combinations
from fastweights_studies.measure.judge.timing import Ceilings
from fastweights_studies.measure.judge.verdict import DRAWS
from fastweights_studies.record import Origin, read_rows, select

from tests.fast_set import fast_where

SMALL = Sizes(B=2, T=70, H=2, K=16, V=16, HV=4)
ROOT = Path(__file__).parents[3]


def test_combinations_cover_what_they_should() -> None:
    every = combinations()
    assert {63, 64, 65, 1000, 8192} <= {what.sizes.T for what in every}
    heads = {(16, 16), (64, 64), (96, 192), (100, 100), (128, 128), (256, 256)}
    assert heads <= {(what.sizes.K, what.sizes.V) for what in every}
    assert {"bfloat16", "float16", "float32"} == {what.dtype for what in every}
    assert {"usual", "none", "forgetting", "strong"} == {what.decay for what in every}
    assert any(what.packed for what in every) and any(what.sizes.HV > what.sizes.H for what in every)
    assert len(set(map(str, every))) == len(every)


@fast_where(lambda given: given["name"] in list(CASES)[:6])
@pytest.mark.parametrize("name", CASES)
def test_the_torch_form_passes(name: str) -> None:
    packed = Sizes(B=1, T=sum(PACKED), H=2, K=16, V=16)
    for what in (Combination(SMALL), Combination(packed, "float32", "forgetting", packed=True)):
        row = checks.check(name, what, "cpu", "torch", 0)
        assert row["failures"] == []
        states = CASES[name].states
        assert row["errors"].keys() >= {"o", "dq", "dv", *states, *(f"d{s}" for s in states if s != "count")}


def break_op(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """(o, S) of linear attention go through `change`, in the checked calls alone."""
    case = CASES["simple_gla"]
    plain = case.op

    def op(*, backend: str, **arguments: Any) -> Any:
        o, S = plain(**arguments, backend="torch")
        return change(o, S) if backend == "auto" else (o, S)

    monkeypatch.setitem(CASES, "simple_gla", replace(case, op=op))


def broken_row(monkeypatch: pytest.MonkeyPatch, change: Any) -> dict[str, Any]:
    break_op(monkeypatch, change)
    ((_, _, row),) = checks.check_group("simple_gla", [Combination(SMALL)], "cpu", "auto", 0)
    return row


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[str]:
    return [str(failure) for failure in broken_row(monkeypatch, change)["failures"]]


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
    assert row["draws"] == DRAWS and [failure.result for failure in row["failures"]] == ["S"]
    assert row["errors"]["S"] < 5e-3 and row["failures"][0].reason == "budget"
    row = broken_row(monkeypatch, lambda o, S: (o, S + 0.0045 * S.detach()))
    assert row["draws"] == DRAWS and [failure.result for failure in row["failures"]] == ["S"]
    assert row["failures"][0].reason == "twin"
    assert broken_row(monkeypatch, lambda o, S: (o, S))["draws"] == 1


def test_differing_runs_and_exceptions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "two runs differ in S" in broken(monkeypatch, lambda o, S: (o, S + 1e-5 * torch.rand(())))

    def fails(o: Any, S: Any) -> Any:
        raise RuntimeError("no such kernel")

    assert "RuntimeError: no such kernel" in broken(monkeypatch, fails)[0]


@pytest.mark.parametrize("error", [0.0, 0.02])
def test_the_command_writes_a_file_and_exits_with_1_where_an_op_fails(
    error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastweights_studies.measure import kernels

    break_op(monkeypatch, lambda o, S: (o, S + error * S.detach()))
    monkeypatch.setattr(kernels.tuning, "keep_choices", lambda: None)  # sets environment variables of this process
    options = ["--check", "--device", "cpu", "--jobs", "1", "--only", "linear,simple_gla", "--seed", "1"]
    options += ["--combination", "(2,1,8,64,64)", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *options])
    with pytest.raises(SystemExit) as end:
        kernels.main()
    *lines, last = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert end.value.code == (1 if error else 0)
    assert f"{2 - len(failed)} passed, {len(failed)} failed" in last
    assert [line.split()[1] for line in failed] == (["simple_gla"] if error else [])
    rows = read_rows(tmp_path / "kernel-checks-cpu.json")
    assert [row.value for row in select(rows, measure="passes")] == ([1.0, 0.0] if error else [1.0, 1.0])
    assert records.worst_errors(rows)["linear", "half"]["o"] < 5e-3
    failures = [(row.column["op"], row.column["result"]) for row in select(rows, measure="failure")]
    assert failures == ([("simple_gla", "S")] if error else [])
    assert {row.seed for row in select(rows, measure="error")} == {1}


@pytest.mark.slow
def test_the_command_runs_from_a_bare_environment(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "studies/src/fastweights_studies/measure/kernels.py",
        "--check",
        "--device",
        "cpu",
        "--backend",
        "torch",
    ]
    command += ["--jobs", "1", "--only", "gdn", "--combination", "(2,1,8,64,64)", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "1 passed, 0 failed" in done.stdout.splitlines()[-1]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the judge times, on a CPU, with a clock that reads nothing."""
    draw, timed = Case.draw, []
    monkeypatch.setattr(Case, "draw", lambda self, sizes, dtype, device, seed: draw(self, sizes, dtype, "cpu", seed))
    monkeypatch.setattr(measuring, "interleaved", lambda works, repeats: timed.append(sorted(works)) or {})
    monkeypatch.setattr(measuring, "as_graph", lambda work: work)
    monkeypatch.setattr(measuring, "peak_bytes", lambda work: 0)
    return timed


MEASURED: Any = ("simple_gla", SMALL, torch.bfloat16, "auto", 1, Ceilings(1.0, 1.0, 1.0), False)


@pytest.mark.parametrize("wrong", ["nothing", "o", "S", "o without states"])
def test_the_judge_times_no_op_that_fails_its_check(
    wrong: str, timed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(o: Any, S: Any) -> Any:
        if wrong == "o" or (wrong == "o without states" and S is None):
            o = o + 0.02 * o.detach()
        return o, S + 0.02 * S.detach() if wrong == "S" and S is not None else S

    break_op(monkeypatch, change)
    row = measuring.measure(*MEASURED)
    if wrong == "nothing":
        assert timed == [["ours"]] * 4 and "refused" not in row
        assert row.keys() >= {"forward", "forward_backward"}
    else:
        assert timed == [] and not row.keys() & {"forward", "forward_backward"}
        assert row["refused"][0].result == wrong.split()[0]


@pytest.mark.parametrize("wrong", [False, True])
def test_what_was_checked_before_is_not_checked_again(
    wrong: bool, timed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong:
        break_op(monkeypatch, lambda o, S: (o + 0.02 * o.detach(), S))
    checked = measuring.check(*MEASURED[:4], with_peers=False)
    monkeypatch.setattr(measuring, "check", lambda *_, **__: pytest.fail("checked again"))
    row = measuring.measure(*MEASURED, checked)
    assert ("refused" in row) == wrong and bool(timed) != wrong and row["errors"] == checked["errors"]


@pytest.mark.slow
def test_a_check_that_fails_in_its_process_refuses_the_op() -> None:
    if torch.cuda.is_available():
        pytest.skip("the check runs where there is a GPU")
    ((name, sizes, row),) = measuring.check_several([("gdn", SMALL)], torch.bfloat16, "auto", 2)
    assert (name, sizes) == ("gdn", SMALL) and "CUDA" in str(row["refused"][0])


ORIGIN = Origin(device="NVIDIA Test", versions={}, commit="abc", date="2026-01-02T00:00:00")


def test_rows_of_what_the_judge_finds() -> None:
    part = {"floor_ms": 0.5, "bound": "memory", "eager": {"ours": 4.0, "fla": 5.0}, "graph": {"ours": 2.0, "fla": 3.0}}
    part["kernels"] = {"ours": 1.0, "flashqla": 1.5}
    found = {
        "errors": {"ours": {"o": 1e-3}, "fla": {"o": 2e-3}}, "stateful_errors": {"ours": {"S": 3e-3}, "draws": 16},
        "failed": {}, "forward": {**part, "peak_bytes": {"ours": 7}},
    }  # fmt: skip
    rows = records.make_time_rows("gdn", SMALL, "bfloat16", "auto", found, ORIGIN)
    (stateful,) = select(rows, measure="error", column={"states": True})
    assert (stateful.value, stateful.column["result"], stateful.run) == (3e-3, "S", {"draws": 16})
    every = select(rows, measure="forward_ms")
    times = {(row.column["peer"], row.column.get("replayed", "profiled")): row.value for row in every}
    assert times == {
        (None, True): 2.0, ("fla", True): 3.0, (None, False): 4.0, ("fla", False): 5.0,
        (None, "profiled"): 1.0, ("flashqla", "profiled"): 1.5,
    }  # fmt: skip
    (peak,) = select(rows, measure="forward_peak_bytes")
    assert peak.value == 7 and records.sizes_in(peak.column) == SMALL
    assert len({records.measured_with_an_op(row) for row in rows}) == 1
    decoded = records.make_time_rows("gdn", SMALL, "bfloat16", "auto", {"in_place": True, "decode": part}, ORIGIN)
    stages = {f"{cache}_cache_s": 1.0 for cache in ("empty", "warm")} | {
        f"{cache}_cache_stages_s": {"imports": 1.0} for cache in ("empty", "warm")
    }
    cold = records.make_cold_rows("gdn", SMALL, "bfloat16", "auto", stages, 4, ORIGIN)
    assert {row.run["processes"] for row in cold} == {4}
    subjects = {records.measured_with_an_op(row) for row in rows + decoded + cold}
    assert len(subjects) == 3  # a run of one leaves the others


def test_why_an_op_has_no_times_is_kept() -> None:
    wrong = {"errors": {"ours": {"dg": 0.03}}, "refused": [*over_budget({"dg": 0.03}, torch.bfloat16).values()]}
    raised = measuring.refusal(RuntimeError("no such kernel"))
    said = [
        [records.describe_failure(row) for row in records.make_time_rows("gdn", SMALL, "bfloat16", "auto", found, ORIGIN)
         if row.measure == "failure"]
        for found in (wrong, raised)
    ]  # fmt: skip
    assert said == [["dg 3.0e-02 (budget 2e-02)"], ["RuntimeError"]]
