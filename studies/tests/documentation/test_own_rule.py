"""The studies' commands of docs/own_rule.md do what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastweights_studies.leaderboard import PARTS, load_board
from fastweights_studies.leaderboard.untrained import gates_of
from fastweights_studies.places import ROOT

PAGE = (ROOT / "docs" / "own_rule.md").read_text()
EXAMPLE = ROOT / "examples" / "own_rule"


def test_the_page_shows_the_file() -> None:
    assert f"```python\n{(ROOT / 'studies/examples/two_speed_untrained.py').read_text()}```" in PAGE


def run(command: str, *options: str) -> str:
    """What a command of the page prints."""
    assert f"    {command}\n" in PAGE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", *command.split(), *options]
    ended = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_rule_joins_the_comparison_without_training(tmp_path: Path) -> None:
    command = "fastweights leaderboard rules --mixers two-speed,gla --import examples/own_rule/two_speed.py"
    run(f"{command} --import studies/examples/two_speed_untrained.py", "--output", str(tmp_path))
    rows = load_board(tmp_path / "rules-cpu.json").rows
    entries = {(entry.column, entry.label): entry for entry in PARTS["rules"].entries(rows)}
    assert len(entries) == 2 * 4 * 4
    own = [entry for (_, rule), entry in entries.items() if rule == "two-speed"]
    assert all(entry.run["state"] == 2 * entry.rows[0].column["channels"] ** 2 for entry in own)
    # Without decay both memories are one, and on this stream the best decay is none.
    found, gla = (entries["noise, d = 8", rule] for rule in ("two-speed", "gla"))
    assert gates_of(found) == {"decay": 1.0} and found.values == pytest.approx(gla.values, rel=1e-4)


@pytest.mark.slow
def test_speed_and_memory_are_named_with_what_measures_them() -> None:
    command = "fastweights leaderboard training-speed decoding-speed memory --mixers two-speed"
    printed = run(f"{command} --import examples/own_rule/two_speed.py")
    for script in ("training_steps --compile blocks --replay", "decode_table"):
        line = (
            f"  python -m fastweights_studies.measure.{script} --mixers two-speed --import {EXAMPLE / 'two_speed.py'}"
        )
        assert printed.count(line) == 2  # its own part, and memory
