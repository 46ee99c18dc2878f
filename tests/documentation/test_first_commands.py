"""The way of a new user: commands, run files and scripts of the first pages run as they are written, in a folder of their own.
Only steps are fewer."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.cli import main
from fastweights.training.language import load_run, train_language
from fastweights.training.language.planning import plan_training
from tests.fast_set import slow

from ..training.language.small import WORDS

ROOT = Path(__file__).parents[2]

COMMAND = re.compile(r"^    fastweights (.+)$", re.MULTILINE)
# Added to the commands that train: a few steps. A board of the leaderboard takes minutes and is left out.
SHORTER = {"recall": "--steps 3 --test-examples 16", "train": "--max-steps 3"}
LEFT_OUT = "leaderboard"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["start.md", "own_rule.md", "tasks.md"])
def test_commands_run_as_they_are_written(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = COMMAND.findall((ROOT / "docs" / page).read_text())
    assert commands
    for command in commands:
        name, *words = shlex.split(command, comments=True)
        if name == LEFT_OUT:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "fastweights", name, *words, *SHORTER.get(name, "").split()],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


TRAIN = (ROOT / "docs" / "train.md").read_text()
FILES = re.findall(r"```toml\n(.*?)```", TRAIN, re.DOTALL)
LARGE, BOOK, STAGES = (
    next(file for file in FILES if f'output = "runs/{name}"' in file) for name in ("small", "book", "hybrid")
)


def write_chapters(folder: Path, characters: int = 20_000) -> None:
    """Eight chapters of a book."""
    folder.mkdir()
    for number in range(1, 9):
        draw, text = random.Random(number), f"Chapter {number}\n\nIt was a dark night.\n"
        while len(text) < characters:
            text += " ".join(draw.choices(WORDS, k=9)).capitalize() + ".\n"
        (folder / f"chapter{number}.txt").write_text(text)


@pytest.mark.slow
def test_a_book_of_eight_chapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Nothing but the steps is changed, and the commands of the page follow."""
    section = TRAIN.partition("## Text of your own")[2].partition("\n## ")[0]
    commands = COMMAND.findall(section)
    assert [command.split()[0] for command in commands] == ["train", "generate"] and BOOK in section
    monkeypatch.chdir(tmp_path)
    write_chapters(tmp_path / "chapters")
    (tmp_path / "book.toml").write_text(BOOK)
    for command in commands:
        name, *words = shlex.split(command)
        assert main([name, *words, *(["--max-steps", "3"] if name == "train" else ["--max-new-tokens", "5"])]) == 0
    shown = capsys.readouterr()
    assert "training a tokenizer: 0.0 of about 0.2 MB" in shown.err and "tokenizing the text: 0.0 of" in shown.err
    assert "Models: runs/book/model\n" in shown.out and "gdn continues 'It was' with:" in shown.out


@pytest.mark.parametrize("setting", slow("", "held_out_fraction = 0.3", 'held_out = ["text/chapter8.txt"]'))
def test_the_first_run_file_trains_on_eight_chapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """With rows as long as on the page, and each of the settings that it names; its model is larger than a test can train."""
    named = re.findall(r"^\| `(held_out\w* = [^`]+)`", TRAIN, re.MULTILINE)
    assert [line.split(" = ")[0] for line in named] == ["held_out_fraction", "held_out"]
    monkeypatch.chdir(tmp_path)
    write_chapters(tmp_path / "text")
    (tmp_path / "run.toml").write_text(LARGE.replace("[corpus]", f"[corpus]\n{setting}"))
    run = load_run(tmp_path / "run.toml")
    assert run.length == 2048 and run.corpus.paths == ("text",)
    small = dataclasses.replace(
        run, model={"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "linear"}, batch_size=1,
        accumulation=1, max_tokens=None, max_steps=1, warmup_tokens=None, evaluate_every=0, context_lengths=(), precision="no",
        tokenizer=dataclasses.replace(run.tokenizer, vocab_size=300),
    )  # fmt: skip
    (result,) = train_language(small) or ()
    held_out = [document.text for document in run.corpus.documents() if document.held_out]
    assert result.held_out_loss > 0 and 1 <= len(held_out) <= 4
    assert not setting.startswith("held_out =") or held_out == [(tmp_path / "text" / "chapter8.txt").read_text()]


def test_a_dry_run_shows_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chapters(tmp_path / "text", characters=100)
    (tmp_path / "run.toml").write_text(LARGE)
    (model,) = plan_training(load_run("run.toml"), gpu="h100")["models"]
    shown = re.search(r"```text\n(.*?)```", TRAIN, re.DOTALL)
    assert shown is not None
    for line in shown[1].splitlines():
        name, value = line.strip().split(": ", 1)
        assert value == (f"{model[name]:,}" if isinstance(model[name], int) else model[name])
    (tmp_path / "run.toml").write_text(STAGES)
    assert [stage.length for stage in load_run("run.toml").stage_runs()] == [4096, 131072]


@pytest.mark.slow
def test_the_script_of_the_tasks_runs(tmp_path: Path) -> None:
    """As a file of its own, without another line."""
    scripts = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
    (script,) = (script for script in scripts if "run_recall(" in script)
    assert "__main__" not in script
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"{'linear': 0\.\d+, 'gdn': 0\.\d+}\n", done.stdout)
    assert (tmp_path / "runs" / "parity" / "results.json").exists()
