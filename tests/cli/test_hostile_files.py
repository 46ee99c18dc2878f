"""Files that a command reads beside models: its run file, texts, measurements, and all that an earlier command wrote. Each may be
a pipe or a device, which never end, or be nested or huge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fastweights.cli import main

from ..evaluation.small import TEXT, save
from .hostile import NESTED, limits, link, listing, pipe, sparse, write

RUN = """
length = 32
batch_size = 2
max_steps = 2
checkpoint_every = 1
keep_checkpoints = 1
evaluation_rows = 2
context_lengths = [16]
output = "trained"
cache = "cache"
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""
RECALL = """recall --mixers linear --pairs 2 --vocab-size 16 --width 8 --heads 2 --layers 1 --steps 2 --batch-size 4
    --learning-rates 0.01 --test-examples 4 --workers 1 --output out"""
HARMS: dict[str, Callable[[str], Callable[[Path], None]]] = {
    "a pipe": pipe,
    "a device": lambda name: link(name, "/dev/zero"),
    "nested": lambda name: write(name, NESTED),
    "something else": lambda name: write(name, '{"format": 1, "x": 3}'),
    "rows of something else": lambda name: write(
        name,
        json.dumps({"format": 1, "rows": {"gdn-write 1": 3}, "comparisons": [3], "part": 3, "size": [], "setting": 3}),
    ),
    "3 GB": lambda name: lambda folder: (write(name, b"")(folder), sparse(name)(folder)),
}
# What a command reads, and the command.
READ = {
    "run.toml": "train run.toml",
    "recall.toml": "recall recall.toml",
    "out/experiment.json": RECALL,
    "trained/run.json": "train good.toml",
    "out/mqar-small.json": "leaderboard mqar --mixers linear --output out --workers 1",
    "out/C1.json": "reproduce --list --output out",
    "measured/kernels-nvidia-h200.json": "reproduce S1 --measurements measured --output out",
    "measured/training-steps-a.json": "leaderboard training-speed --measurements measured --output out",
    "measured/decode-table-a.json": "leaderboard decoding-speed --measurements measured --output out",
    "model/run.json": "evaluate model --lengths 40",
    "model/train.toml": "convert model --to pgdn --output new",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "good.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capfd.readouterr()
    with limits():
        code = main(command.split())
    return code, capfd.readouterr().err


def check_one_line(code: int, error: str) -> None:
    assert code in (1, 2) and error.startswith("fastweights: error: ") and error.count("\n") == 1, error
    assert error.rstrip("\n").isprintable() and len(error) < 1200, error


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", READ)
def test_files_that_a_command_reads(file: str, harm: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = place / file
    path.parent.mkdir(exist_ok=True)
    if path.parent.name == "model":
        save(path.parent)
    HARMS[harm](path.name)(path.parent)
    before = listing(place)
    code, error = run(READ[file], capfd)
    check_one_line(code, error)
    left = {entry for entry in listing(place) if entry[0].name != ".lock"}
    assert (path.name in error or path.parent.name in error) and left == before


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
