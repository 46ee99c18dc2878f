"""Control characters in what a stranger wrote: on a terminal every command writes them out, in a pipe the text stays as it is."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table

from fastweights import cli
from fastweights.cli import main
from fastweights.terminal import Console, show, visible

from ..evaluation.small import TEXT, model, tokenizer
from .hostile import ESCAPE, SHOWN, check_harmless, limits, on_a_terminal, set_keys, write


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    with limits():
        yield tmp_path


def hostile_model(folder: Path) -> Path:
    """Its most likely token, whatever it reads, is one of two with escapes."""
    found, words = model(), tokenizer()
    words.add_tokens([ESCAPE, f"{ESCAPE} again"])
    found.resize_token_embeddings(len(words), mean_resizing=False)
    torch.nn.init.zeros_(found.lm_head.weight)
    found.lm_head.weight.data[-2:] = torch.tensor([[1.0], [-1.0]])
    found.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def test_text_of_a_model(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    hostile_model(place / "model")
    command = ["generate", "model", "The", "--greedy", "--max-new-tokens", "20"]
    capfd.readouterr()
    assert main(command) == 0
    plain = capfd.readouterr().out
    shown = on_a_terminal(lambda: main(command), monkeypatch)
    assert ESCAPE in plain and SHOWN in shown
    check_harmless(shown)


CALLS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a key of the configuration": (
        lambda place: (hostile_model(place / "model"), set_keys("config.json", mixer=ESCAPE)(place / "model")),
        ["generate", "model", "The"],
    ),
    "the name of the folder": (
        lambda place: hostile_model(place / ESCAPE),
        [
            "evaluate",
            ESCAPE,
            "--on",
            "copy",
            "--lengths",
            "40",
            "--pairs",
            "2",
            "--symbols",
            "16",
            "--recall-examples",
            "1",
        ],
    ),
    "texts that run.json names": (
        lambda place: (
            hostile_model(place / "model"),
            write(f"{ESCAPE}.txt", TEXT)(place),
            write("run.json", json.dumps({"corpus": {"paths": [f"{ESCAPE}.txt"]}, "model": {}}))(place / "model"),
        ),
        ["evaluate", "model", "--lengths", "40", "--stretch", "8", "--texts", "1"],
    ),
    "an option": (lambda place: None, ["mixers", ESCAPE]),
    "an option that does not exist": (lambda place: None, ["mixers", f"--{ESCAPE}"]),
    "a run file": (lambda place: write("run.toml", f'mixer = "{SHOWN}"')(place), ["train", "run.toml"]),
    "a part of a run file": (
        lambda place: write("r.toml", f'[parts."{SHOWN}"]\nwidth = -1')(place),
        ["recall", "r.toml"],
    ),
    "a label": (lambda place: None, ["recall", "--mixers", f"gdn@{ESCAPE}", "--width", "-1"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_commands(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, command = CALLS[name]
    prepare(place)
    shown = on_a_terminal(lambda: main(command), monkeypatch)
    assert shown
    check_harmless(shown)


def test_cells_titles_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(title=ESCAPE)
    table.add_column(f"column {ESCAPE}", overflow="fold")
    table.add_row(f"cell {ESCAPE}")

    def work() -> None:
        console = Console()
        console.print(table)
        with console.status(ESCAPE):
            console.print(ESCAPE, markup=False)

    shown = on_a_terminal(work, monkeypatch)
    check_harmless(shown)
    assert "cell" in shown and r"\x1b" in shown


def test_lines_and_tabs_stay_and_so_do_other_scripts() -> None:
    text = "a\tb\nzażółć 字 👩\u200d🚀 \u200cفارسی"
    assert visible(text) == text


def test_show_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show(ESCAPE)
    show(ESCAPE, error=True, end="")
    assert capsys.readouterr() == (f"{ESCAPE}\n", ESCAPE)


def test_commands_print_through_show() -> None:
    """Help and the version, which are ours, are printed as they are."""
    for path in Path(cli.__file__).parent.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        printed = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert len(printed) == (2 if path.name == "__init__.py" else 0), path.name
        assert "rich.console" not in path.read_text("utf-8"), f"{path.name}: fastweights.terminal has the console"
