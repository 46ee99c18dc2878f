"""Commands take a model whose config.json has keys of other tools, with one line on stderr that names them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest

from fastweights.cli import main

from ..evaluation.small import save

COMMANDS = {
    "generate": lambda folder, out: ["generate", folder, "the", "--max-new-tokens", "2"],
    "convert": lambda folder, out: ["convert", folder, "--to", "pgdn", "--output", out],
}


@pytest.fixture
def folder(tmp_path):
    found = save(tmp_path / "model")
    path = found / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "mine", "num_head": 4}))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_goes_on_with_a_warning(folder, tmp_path, command, capsys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(COMMANDS[command](str(folder), str(tmp_path / "out"))) == 0, capsys.readouterr().err
    (message,) = {str(one.message) for one in caught if "does not know" in str(one.message)}
    assert "'note', 'num_head' (did you mean 'num_heads'?)" in message
    if command == "convert":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_warning_is_one_line_on_stderr(folder, tmp_path, command):
    """However often the command reads the file."""
    command = [sys.executable, "-m", "fastweights", *COMMANDS[command](str(folder), str(tmp_path / "out"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stderr.splitlines() if "does not know" in line]
    assert (
        line.startswith("fastweights: warning: FastWeightsConfig does not know")
        and "configuration.py" not in done.stderr
    )
