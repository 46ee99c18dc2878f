"""Files that a command reads beside models: its run file, texts, measurements, and all that an earlier command wrote. Each may be
a pipe or a device, which never end, or be nested or huge."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastweights.cli import main

from ..evaluation.small import TEXT, save
from .hostile import HARMS, check_one_line, check_reading, run
from .run_file import RUN as SMALL_RUN

RUN = SMALL_RUN.replace("max_steps = 2\n", "max_steps = 2\ncheckpoint_every = 1\nkeep_checkpoints = 1\n")
RECALL = """recall --mixers linear --pairs 2 --vocab-size 16 --width 8 --heads 2 --layers 1 --steps 2 --batch-size 4
    --learning-rates 0.01 --test-examples 4 --workers 1 --output out"""
# What a command reads, and the command.
READ = {
    "run.toml": "train run.toml",
    "recall.toml": "recall recall.toml",
    "out/experiment.json": RECALL,
    "trained/run.json": "train good.toml",
    "model/run.json": "evaluate model --lengths 40",
    "model/train.toml": "convert model --to pgdn --output new",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "good.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", READ)
def test_files_that_a_command_reads(file: str, harm: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_reading(place / file, READ[file], harm, capfd)


@pytest.mark.parametrize("harm", ["a pipe", "a device"])
@pytest.mark.parametrize("option", ["--text", "--import"])
def test_files_that_an_option_names(option: str, harm: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(place / "model")
    HARMS[harm]("named.py")(place)
    code, error = run(f"evaluate model --lengths 40 {option} named.py", capfd)
    check_one_line(code, error)
    assert "named.py" in error


def finished(place: Path, command: str, *folders: str) -> list[Path]:
    """The files that a command has written."""
    assert main(command.split()) == 0
    return sorted(path for folder in folders for path in (place / folder).rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["a pipe", "a device"])
@pytest.mark.parametrize("command", ["train good.toml", RECALL], ids=["train", "recall"])
def test_files_of_an_earlier_command(command: str, harm: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each of them: the command ends soon and well, or says in a line what is wrong."""
    folders = ["trained", "cache"] if command.startswith("train") else ["out"]
    files = finished(place, command, *folders)
    assert len(files) > 4
    whole = place.with_name(f"{place.name}-whole")
    shutil.copytree(place, whole)
    for path in files:
        HARMS[harm](path.name)(path.parent)
        code, error = run(command, capfd)
        assert code == 0 or error.count("fastweights: error: ") == 1, (path, error)
        for folder in folders:
            shutil.rmtree(place / folder)
            shutil.copytree(whole / folder, place / folder)
