"""The benchmark of trainings on several GPUs, as far as no GPU is needed."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastweights_studies.measure import scaling
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.rows import replace_rows
from fastweights_studies.record import read_rows, select

from fastweights.training.language import LanguageRun

TINY: dict[str, Any] = {
    "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 64, "mixer": "gdn"},
    "length": 16, "batch_size": 2, "max_steps": scaling.WARM + 2, "checkpoint_every": scaling.WARM + 2, "precision": "bf16",
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    scaling.write_text(folder, 64, 2000)
    return folder


def test_a_training_is_timed_and_leaves_no_checkpoint(tmp_path: Path, text: Path) -> None:
    row = scaling.train(LanguageRun(output=str(tmp_path / "run"), **TINY), text)
    assert row is not None and (row["tokens_per_step"], row["steps"]) == (32, 2)
    assert row["tokens_per_second"] == pytest.approx(2 * 32 / (2e-3 * row["step_ms"])) and row["first_step_s"] > 0
    assert not list(tmp_path.glob("run/**/*.safetensors"))


def test_the_first_step_may_be_the_only_one_that_does_not_count(tmp_path: Path, text: Path) -> None:
    given = {**TINY, "max_steps": 2, "checkpoint_every": 2}
    row = scaling.train(LanguageRun(output=str(tmp_path / "run"), **given), text, warm=1)
    assert row is not None and row["steps"] == 1 and row["step_ms"] < 1e3 * 60


@pytest.mark.slow
def test_two_processes_train_when_they_are_told_to(text: Path) -> None:
    with scaling.launched(2, TINY, text) as start:
        row = start()(120)
    assert row["tokens_per_step"] == 64 and row["tokens_per_second"] > 0


def test_a_training_that_fails_or_exceeds_its_limit_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rows of the others are written; a row of an earlier run stays."""
    file = tmp_path / "scaling-a-gpu.json"
    earlier = {"tokens_per_second": 1.0}
    replace_rows(file, scaling.make_training_rows("gdn-340m", None, 2, "DDP", 8, 16, earlier, describe("a GPU")))

    @contextmanager
    def launched(processes: int, fields: dict[str, Any], text: Path, gpu: int | None) -> Iterator[scaling.Start]:
        def wait(limit: float) -> dict[str, Any]:
            if processes > 1 and "fsdp" not in fields:
                raise subprocess.TimeoutExpired("torchrun", round(limit))
            found = {"step_ms": 1.0, "memory_bytes": 1, "predicted_memory_bytes": 1, "first_step_s": 1.0, "lanes": {}}
            return {**found, "tokens_per_step": 16 * processes, "tokens_per_second": 3.0 * processes}

        yield lambda: wait

    monkeypatch.setattr(scaling, "launched", launched)
    monkeypatch.setattr(scaling, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    options = [
        "--presets",
        "gdn-340m",
        "--ways",
        "DDP,FSDP2,FSDP2-kept,context-heads",
        "--length",
        "16",
        "--limit",
        "7",
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *options])
    with pytest.raises(
        SystemExit, match="2 of 5 trainings failed: gdn-340m, 2 GPUs, DDP; gdn-340m, 2 GPUs, context-heads"
    ):
        scaling.main()
    assert "timed out after 7 seconds" in capsys.readouterr().out
    speeds = select(read_rows(file), measure="tokens_per_second")
    by_way = {row.column["way"]: row for row in speeds}
    assert len(speeds) == 4 and by_way["DDP"].value == 1.0
    assert by_way["FSDP2-kept"].options == {"fsdp": True, "reshard_after_forward": False}
    shares = {way: scaling.share_of_one_gpu(speeds, row.column) for way, row in by_way.items()}
    assert shares.pop("DDP") == 1.0 / (2 * 3.0) and set(shares.values()) == {1.0}
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--gpus", "2", "--ways", "FSDP2", "--batch", "4"])
    scaling.main()
    (row,) = select(read_rows(file), measure="tokens_per_second", column={"batch": 4})
    assert scaling.share_of_one_gpu(read_rows(file), row.column) is None  # one GPU had another batch
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--mixers", "own,gka,pgdn"])
    scaling.main()
    rows = select(read_rows(file), measure="tokens_per_second", column={"batch": 4})
    assert [row.mixer for row in rows] == [None, "gka", "pgdn"]


def test_trainings_of_one_gpu_go_side_by_side() -> None:
    assert scaling.turns([1, 4, 4, 1, 1, 4], 2) == [[0, 3], [4], [1], [2], [5]]


def test_a_turn_has_its_seconds_together() -> None:
    """All its trainings start before the first is waited for."""
    calls: list[Any] = []

    def start(place: int) -> scaling.Wait:
        calls.append(place)
        return lambda limit: calls.append(limit) or {}  # type: ignore[func-returns-value]

    waits = scaling.begin([3, 5], {3: lambda: start(3), 5: lambda: start(5)}, 0.2)
    assert calls == [3, 5] and [place for place, _ in waits] == [3, 5]
    waits[0][1]()
    time.sleep(0.3)
    waits[1][1]()
    assert 0 < calls[2] <= 0.2 and calls[3] == 0


def test_rows_replace_those_of_the_same_training(tmp_path: Path) -> None:
    """Also where the way had other options; other mixers stay."""
    file, origin = tmp_path / "rows.json", describe("a GPU")

    def measure(mixer: str | None, speed: float) -> list[Any]:
        return scaling.make_training_rows("gdn-340m", mixer, 2, "DDP", 8, 16, {"tokens_per_second": speed}, origin)

    earlier = [dataclasses.replace(row, options={"NCCL_MAX_CTAS": 16}) for row in measure(None, 1.0)]
    for rows in (earlier, measure("gka", 2.0), measure(None, 3.0)):
        replace_rows(file, rows, scaling.same_training)
    assert [(row.mixer, row.value, row.options) for row in read_rows(file)] == [(None, 3.0, {}), ("gka", 2.0, {})]


def test_rows_of_several_gpus_are_beside_the_one_of_their_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for day, gpus, way, speed in (
        (1, 1, None, 4.0), (1, 2, "DDP", 6.0), (2, 1, None, 5.0), (2, 2, "FSDP2", 6.0), (2, 2, "DDP-bf16", 7.0),
    ):  # fmt: skip
        origin = dataclasses.replace(describe("a GPU"), date=f"2026-01-0{day}T00:00:00+00:00")
        values = {"tokens_per_second": speed}
        rows = scaling.make_training_rows("gdn-340m", None, gpus, way, 8, 16, values, origin)
        replace_rows(file, rows, scaling.same_training)
    rows = read_rows(file)
    shares = {way: scaling.share_of_one_gpu(rows, {"gpus": 2, "way": way}) for way in ("DDP", "FSDP2", "DDP-bf16")}
    assert shares == {"DDP": 6 / (2 * 4), "FSDP2": 6 / (2 * 5), "DDP-bf16": 7 / (2 * 5)}


# A launcher and its process, in a session of its own as torchrun's are, that do not listen.
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
else:
    print("ready", flush=True)
time.sleep(100)
"""


def has_ended(process: psutil.Process) -> bool:
    """Within seconds; a killed process stays as a zombie where nobody asks how it ended."""
    try:
        process.wait(2)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_processes_that_do_not_listen_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scaling, "GRACE", 0.2)
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = psutil.Process(int(launcher.stdout.readline()))
        scaling.end(launcher)
    assert launcher.returncode == -signal.SIGKILL and has_ended(child)
    scaling.end(launcher)  # of those that have ended, nothing is left to end


@pytest.mark.slow
def test_a_training_beyond_its_limit_ends_with_all_its_processes(text: Path) -> None:
    with scaling.launched(2, {**TINY, "max_steps": 10**7, "checkpoint_every": 10**7}, text) as start:
        with pytest.raises(subprocess.TimeoutExpired):
            start()(25)
        ours = [one for one in psutil.process_iter(["cmdline"]) if str(text) in (one.info["cmdline"] or ())]
        assert all(map(has_ended, ours))


@pytest.mark.parametrize("settings", scaling.WAYS.values(), ids=scaling.WAYS)
def test_ways_are_those_of_a_run(settings: dict[str, Any]) -> None:
    assert vars(LanguageRun(precision="bf16", **settings)).items() >= settings.items()


def test_rows_that_are_divided_are_as_long_as_all_gpus_need() -> None:
    assert scaling.settings(1, None, 16) == {}
    assert scaling.settings(2, "FSDP2", 16) == {"fsdp": True}
    wanted = {"context_parallel": 4, "length": 64, "context_way": "state"}
    assert scaling.settings(4, "context-state", 16) == wanted


def test_every_number_of_gpus_is_trained_in_every_way() -> None:
    assert scaling.trainings([1, 2], ["DDP", "FSDP2"]) == [(1, None), (2, "DDP"), (2, "FSDP2")]


@pytest.mark.parametrize(
    ("arguments", "gpus", "message"),
    [
        (["--gpus", "1,2"], 1, "--gpus must be numbers from 1 to 1, the GPUs of this machine, got 1,2"),
        (["--gpus", "0"], 2, "--gpus must be numbers from 1 to 2"),
        (["--mixers", "gdn,gda"], 2, "2"),  # the exit code of a wrong option
        (["--warm", "0"], 2, "2"),
        (["--ways", "ddp"], 2, "--ways must name some of DDP, DDP-bf16, .*got ddp"),
        ([], 0, "needs an NVIDIA GPU, and torch sees none"),
    ],
)
def test_what_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], gpus: int, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with pytest.raises(SystemExit, match=message):
        scaling.main()
