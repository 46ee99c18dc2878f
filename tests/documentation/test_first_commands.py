"""The commands of "start here" and of the worked example run one after the other, in a folder of their own, with few steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .site import ROOT

COMMAND = re.compile(r"^    fastweights (.+)$", re.MULTILINE)
# Added to the commands that train: a few steps. A board of the leaderboard takes minutes and is left out.
SHORTER = {"recall": "--steps 3 --test-examples 16", "train": "--max-steps 3"}
LEFT_OUT = "leaderboard"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["start.md", "own_rule.md"])
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
