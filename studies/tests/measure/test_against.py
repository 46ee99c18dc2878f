"""Another checkout beside this one: what is measured of the host, and what both comparisons write and conclude."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastweights_studies.measure import against, host_time, kernels
from fastweights_studies.measure.judge import host
from fastweights_studies.measure.judge.against import Compared
from fastweights_studies.measure.judge.cases import CASES, find_spec
from fastweights_studies.places import SOURCES
from fastweights_studies.record import read_rows, select


@pytest.mark.parametrize("name", CASES)
def test_the_host_s_part_of_every_op_is_measured_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LONGEST", 0)
    monkeypatch.setattr(host, "CALLS", 1)
    found = host.measure_host(name)
    assert list(found) == ["forward_us", "forward_backward_us"] and min(found.values()) > 0


def test_an_op_that_holds_its_declaration_and_one_that_does_not() -> None:
    op = CASES["gdn"].op

    def newer() -> None: ...

    newer.spec = "its declaration"  # type: ignore[attr-defined]
    assert find_spec(newer) == "its declaration" and "q" in find_spec(op).inputs


@pytest.mark.parametrize(("before", "within"), [(0.1, False), (2.0, True)])
def test_host_time_of_two_checkouts(
    before: float, within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in a process with its own library and this judge; the least time over the turns counts."""
    turns: list[str] = []

    def run(command: list[str], *, env: dict[str, str], cwd: Path, **rest: Any) -> Any:
        paths = env["PYTHONPATH"].split(":")
        assert paths == [str(cwd), str(SOURCES)]
        turns.append("before" if Path(cwd) == tmp_path.resolve() else "after")
        times = {"forward_us": (before if turns[-1] == "before" else 1.5) + len(turns)}
        return subprocess.CompletedProcess(command, 0, json.dumps({"gdn": times}))

    output = tmp_path / "host.json"
    monkeypatch.setattr(host_time, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    assert host_time.compare(tmp_path, ["gdn"], 1.03, output) is within
    assert turns == ["after", "before"] * host_time.TURNS
    rows = {row.column["checkout"]: row for row in read_rows(output)}
    assert (rows["after"].value, rows["before"].value) == (2.5, before + 2)
    assert rows["before"].origin.commit == "unknown" != rows["after"].origin.versions["files"]
    assert f"ratio {2.5 / (before + 2):.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(("memory", "within"), [(100, True), (104, False)])
def test_device_time_and_memory_of_two_checkouts(
    memory: int, within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        Compared("gdn", "1,2,3,4,5", stage, {"after": 1.0, "before": 2.0}, {"after": memory, "before": 100})
        for stage in ("forward", "forward_backward")
    ]
    monkeypatch.setattr(kernels, "compare", lambda *given: iter(found))
    sizes = ["1,2,3,4,5"]
    for _ in range(2):  # once more, in the place of the first
        assert kernels.compare_checkouts(tmp_path, ["gdn"], sizes, "bfloat16", 1.03, tmp_path, "a GPU") is within
    rows = read_rows(tmp_path / "kernels-against-a-gpu.json")
    assert len(rows) == 8 and len(select(rows, measure="device_ms", column={"checkout": "before"})) == 2
    (peak,) = select(rows, measure="peak_bytes", column={"checkout": "after", "stage": "forward", "B": 1, "V": 5})
    assert peak.value == memory and peak.unit == "bytes"
    assert f"ratio 0.500; 0 MB, base 0, ratio {memory / 100:.3f}" in capsys.readouterr().out


def test_one_command_compares_what_this_machine_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Device time and memory where there is a GPU, and host time everywhere; either may fail it."""
    done: list[str] = []

    def warm(*given: Any) -> None:
        done.append("warm")

    def compare_device(*given: Any) -> bool:
        done.append("device")
        return False

    def compare_host(*given: Any) -> bool:
        done.append("host")
        return True

    (tmp_path / "fastweights").mkdir()
    monkeypatch.setattr(against, "warm_checkouts", warm)
    monkeypatch.setattr(kernels, "compare_checkouts", compare_device)
    monkeypatch.setattr(host_time, "compare", compare_host)
    monkeypatch.setattr(sys, "argv", ["against", str(tmp_path), "--only", "gdn"])
    for is_there, code in ((False, 0), (True, 1)):
        monkeypatch.setattr("torch.cuda.is_available", lambda is_there=is_there: is_there)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
        with pytest.raises(SystemExit) as end:
            against.main()
        assert end.value.code == code
    assert done == ["host", "warm", "device", "host"]
    monkeypatch.setattr(sys, "argv", ["against", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        against.main()
    assert "checkout must hold the folder fastweights, got " in capsys.readouterr().err
