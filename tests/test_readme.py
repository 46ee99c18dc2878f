"""What the README promises exists: its commands, their options and its examples. tests/house/test_docs.py looks at links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.layers import registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = README + (ROOT / "docs" / "training.md").read_text()  # the page of the commands
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
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`| {4})make ([a-z-]+)\b", TEXTS))
    assert {"recall", "test"} <= named <= targets


def test_options_exist() -> None:
    text = "".join(map(help_of, ("recall", "train", "evaluate", "generate", "convert", "reproduce")))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXTS)) - {"--help", "--nproc-per-node"}
    assert {"--list", "--mixers", "--to", "--lm-eval"} <= named
    assert named <= set(re.findall(r"--[a-z][a-z-]+", text))


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.strip().splitlines()[1])
def test_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))  # a mixer that it registers
    exec(compile(code, "README.md", "exec"), {"__name__": "example"})
