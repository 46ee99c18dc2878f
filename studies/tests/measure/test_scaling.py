"""The benchmark of trainings on several GPUs, as far as no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.measure import scaling

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
    assert row is not None and (row["processes"], row["tokens per step"], row["steps"]) == (1, 32, 2)
    assert row["tokens/s"] == pytest.approx(2 * 32 / (2e-3 * row["step, ms"])) and row["first step, s"] > 0
    assert not list(tmp_path.glob("run/**/*.safetensors"))


@pytest.mark.slow
def test_two_processes_train_when_they_are_told_to(text: Path) -> None:
    with scaling.launched(2, TINY, text) as train:
        row = train(120)
    assert row["processes"] == 2 and row["tokens per step"] == 64 and row["tokens/s"] > 0


def test_a_training_that_fails_or_exceeds_its_limit_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rows of the others are written; a row of an earlier run stays."""
    rows: dict[str, Any] = {"gdn-340m": {"2 GPUs, DDP": {"tokens/s": 1.0}}}
    file = tmp_path / "scaling.json"

    @contextmanager
    def launched(processes: int, fields: dict[str, Any], text: Path) -> Iterator[Callable[[float], dict[str, Any]]]:
        def train(limit: float) -> dict[str, Any]:
            if processes > 1 and "fsdp" not in fields:
                raise subprocess.TimeoutExpired("torchrun", limit)
            row = {"step, ms": 1.0, "memory, GiB": 1.0, "first step, s": 1.0}
            return {**row, "tokens per step": 16 * processes, "tokens/s": 3.0 * processes}

        yield train

    monkeypatch.setattr(scaling, "launched", launched)
    monkeypatch.setattr(scaling, "kept_rows", lambda *names: (file, "a GPU", rows))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--preset", "gdn-340m", "--length", "16", "--limit", "7"])
    with pytest.raises(SystemExit, match="1 of 6 trainings failed: 2 GPUs, DDP"):
        scaling.main()
    assert "timed out after 7.0 seconds" in capsys.readouterr().out
    written = json.loads(file.read_text())["trainings"]["gdn-340m"]
    assert written["2 GPUs, DDP"] == {"tokens/s": 1.0}
    assert written["2 GPUs, FSDP2-kept"]["settings"] == {"fsdp": True, "reshard_after_forward": False}
    assert len(written) == 6 and all(row.get("share of one GPU", 1.0) == 1.0 for row in written.values())
    rows["gdn-340m"]["1 GPU"]["tokens per step"] = 8  # an earlier run with another batch
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--gpus", "2", "--ways", "FSDP2"])
    scaling.main()
    assert json.loads(file.read_text())["trainings"]["gdn-340m"]["2 GPUs, FSDP2"]["share of one GPU"] is None


@pytest.mark.parametrize("settings", scaling.WAYS.values(), ids=scaling.WAYS)
def test_ways_are_those_of_a_run(settings: dict[str, Any]) -> None:
    assert vars(LanguageRun(**settings)).items() >= settings.items()


def test_every_number_of_gpus_is_trained_in_every_way() -> None:
    assert scaling.trainings([1, 2], ["DDP", "FSDP2"]) == {
        "1 GPU": (1, {}), "2 GPUs, DDP": (2, {}), "2 GPUs, FSDP2": (2, {"fsdp": True}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "gpus", "message"),
    [
        (["--gpus", "1,2"], 1, "--gpus must be numbers from 1 to 1, the GPUs of this machine, got 1,2"),
        (["--gpus", "0"], 2, "--gpus must be numbers from 1 to 2"),
        (["--ways", "ddp"], 2, "--ways must name some of DDP, FSDP2, .*got ddp"),
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
