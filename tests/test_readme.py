"""What the README promises exists: its commands, their options, its examples, its files and the names in its table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.layers import MIXERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def help_of(command: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "fastweights", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "PATH": ""},
    )
    return result.stdout


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`| {4})make ([a-z]+)\b", README))
    assert {"recall", "test"} <= named <= targets


def test_options_exist() -> None:
    text = "".join(map(help_of, ("recall", "train", "evaluate", "generate", "convert")))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - {"--help", "--nproc-per-node"}
    assert {"--list", "--mixers"} <= named
    for option in named:
        assert option in text, option


def test_every_layer_is_in_the_table() -> None:
    table = "".join(line for line in README.splitlines(keepends=True) if line.startswith("| `"))
    assert set(re.findall(r"`([a-z0-9-]+)`", table)) >= set(MIXERS)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)", README))
def test_linked_files_exist(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.strip().splitlines()[1])
def test_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
