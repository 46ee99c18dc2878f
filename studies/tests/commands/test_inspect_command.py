"""`fastweights inspect` from outside: files, page, and one line for what is wrong."""

from __future__ import annotations

import json

import pytest
from fastweights_studies.commands.inspect import MEASURES as NAMED
from fastweights_studies.inspection import MEASURES

from fastweights.cli import main
from tests.evaluation.small import TEXT, save


@pytest.fixture
def run(tmp_path):
    """The folder of a training run with a small model in it, and a file with text."""
    save(tmp_path / "run" / "model", mixer=["pgdn", "palimpsa-d"])
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "run"


def test_page_and_arrays(run, tmp_path, capsys):
    text = str(tmp_path / "text.txt")
    assert main(["inspect", str(run), "--text", text, "--tokens", "40", "--every", "16"]) == 0
    folder = run / "inspection"
    assert capsys.readouterr().out == f"Page: {folder / 'index.html'}\n"
    facts = json.loads((folder / "inspection.json").read_text())
    assert (facts["tokens"], facts["every"], facts["text"]) == (40, 16, text)
    assert (folder / "preconditioner.png").is_file() and (folder / "metaplasticity.png").is_file()


def test_chosen_measures(run, tmp_path, capsys):
    output = tmp_path / "seen"
    command = ["inspect", str(run), "--text", str(tmp_path / "text.txt"), "--tokens", "20", "--output", str(output)]
    assert main([*command, "--measures", "norms,slots"]) == 0
    assert {path.name for path in output.iterdir()} == {"norms.png", "arrays.npz", "index.html", "inspection.json"}
    assert "No layer has what is measured by: slots" in capsys.readouterr().out


def test_measures_in_the_help():
    assert NAMED.split(", ") == list(MEASURES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measures", "norm"], "measures must be one of"),
        (["--tokens", "0"], "--tokens"),
        (["--every", "0"], "every"),
        (["--output", "{text}"], "--output must be a folder"),
        (["--text", "missing.txt"], "missing.txt"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, capsys, options, message):
    text = str(tmp_path / "text.txt")
    options = [option.format(text=text) for option in options]
    before = sorted(tmp_path.rglob("*"))
    assert main(["inspect", str(run), *([] if "--text" in options else ["--text", text]), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert sorted(tmp_path.rglob("*")) == before
