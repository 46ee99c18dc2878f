"""No process of the studies' commands executes files of the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli import hostile_place
from tests.cli.hostile_place import nothing_ran, run

hostile = hostile_place.hostile  # a fixture
# The script of a user: calls that start processes, with settings small enough for a test.
SCRIPT = """
import sys
from dataclasses import replace

from fastweights.cli import main
from fastweights_studies.claims import Conditions
from fastweights_studies.claims.watched import in_processes
from fastweights_studies.leaderboard import SIZES
from studies.tests.leaderboard.toy import TOY

if __name__ == "__main__":
    if sys.argv[1] == "reproduce":
        assert in_processes(abs, [-3, 2], Conditions(seeds=(0,), workers=2)) == [3, 2]
    else:
        SIZES["small"] = TOY
        for part in ("tracking", "language"):
            assert main(["leaderboard", part, "--workers", "2", "--mixers", "linear,gdn", "--output", "out"]) == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["leaderboard", "reproduce"])
def test_processes_of_the_other_commands(hostile, command):
    (script := hostile.parent / "script.py").write_text(SCRIPT)
    ended = run(sys.executable, str(script), command, path=str(Path(__file__).parents[3]))
    assert nothing_ran(hostile) and ended.returncode == 0, ended.stderr
