"""The benchmark of trainings on several GPUs, as far as no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
def test_two_processes_train_when_they_are_told_to(text: Path) -> None:
    with scaling.launched(2, TINY, text) as train:
        row = train(120)
    assert row["tokens_per_step"] == 64 and row["tokens_per_second"] > 0


def test_a_training_that_fails_or_exceeds_its_limit_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rows of the others are written; a row of an earlier run stays."""
    file = tmp_path / "scaling-a-gpu.json"
    earlier = {"tokens_per_second": 1.0}
    replace_rows(file, scaling.make_training_rows("gdn-340m", 2, "DDP", 8, 16, earlier, describe("a GPU")))

    @contextmanager
    def launched(processes: int, fields: dict[str, Any], text: Path) -> Iterator[Callable[[float], dict[str, Any]]]:
        def train(limit: float) -> dict[str, Any]:
            if processes > 1 and "fsdp" not in fields:
                raise subprocess.TimeoutExpired("torchrun", limit)
            found = {"step_ms": 1.0, "memory_bytes": 1, "first_step_s": 1.0, "lanes": {}}
            return {**found, "tokens_per_step": 16 * processes, "tokens_per_second": 3.0 * processes}

        yield train

    monkeypatch.setattr(scaling, "launched", launched)
    monkeypatch.setattr(scaling, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    options = ["--presets", "gdn-340m", "--length", "16", "--limit", "7", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *options])
    with pytest.raises(
        SystemExit, match="2 of 8 trainings failed: gdn-340m, 2 GPUs, DDP; gdn-340m, 2 GPUs, DDP-launched"
    ):
        scaling.main()
    assert "timed out after 7.0 seconds" in capsys.readouterr().out
    speeds = select(read_rows(file), measure="tokens_per_second")
    by_way = {row.column["way"]: row for row in speeds}
    assert len(speeds) == 7 and by_way["DDP"].value == 1.0
    assert by_way["FSDP2-kept"].options == {"fsdp": True, "reshard_after_forward": False}
    shares = {way: scaling.share_of_one_gpu(speeds, row.column) for way, row in by_way.items()}
    assert shares.pop("DDP") == 1.0 / (2 * 3.0) and set(shares.values()) == {1.0}
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--gpus", "2", "--ways", "FSDP2", "--batch", "4"])
    scaling.main()
    speeds = select(read_rows(file), measure="tokens_per_second", column={"batch": 4})
    assert [scaling.share_of_one_gpu(read_rows(file), row.column) for row in speeds] == [
        None
    ]  # one GPU had another batch


@pytest.mark.parametrize("settings", scaling.WAYS.values(), ids=scaling.WAYS)
def test_ways_are_those_of_a_run(settings: dict[str, Any]) -> None:
    assert vars(LanguageRun(**settings)).items() >= settings.items()


def test_every_number_of_gpus_is_trained_in_every_way() -> None:
    assert scaling.trainings([1, 2], ["DDP", "FSDP2"]) == [(1, None), (2, "DDP"), (2, "FSDP2")]


@pytest.mark.parametrize(
    ("arguments", "gpus", "message"),
    [
        (["--gpus", "1,2"], 1, "--gpus must be numbers from 1 to 1, the GPUs of this machine, got 1,2"),
        (["--gpus", "0"], 2, "--gpus must be numbers from 1 to 2"),
        (["--ways", "ddp"], 2, "--ways must name some of DDP, DDP-launched, .*got ddp"),
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
