"""docs/own_rule.md shows the example whose tests inherit the contract suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

EXAMPLE = ROOT / "examples" / "own_rule"
PAGE = (ROOT / "docs" / "own_rule.md").read_text()


def test_the_page_shows_the_file() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code == (EXAMPLE / "two_speed.py").read_text()


def test_it_is_as_short_as_the_page_says() -> None:
    assert "Together they are 60 lines" in PAGE
    assert sum(bool(line.strip()) for line in (EXAMPLE / "two_speed.py").read_text().splitlines()) <= 60


def test_its_tests_pass() -> None:
    """In a process of their own, because the example registers a mixer and an op."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
        "-rA",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*command, str(EXAMPLE)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]
    passed = set(re.findall(r"^PASSED \S*::(\w+)", ended.stdout, re.MULTILINE))
    promised = {
        *("test_segments_are_the_whole", "test_chunked_is_sequential", "test_packed_is_separate", "test_gradcheck"),
        *(
            "test_shapes",
            "test_bad_numbers_reach_what_depends_on_them_and_nothing_else",
            "test_fullgraph",
            "test_opcheck",
        ),
        *("test_one_memory_alone_is_linear_attention", "test_the_layer_keeps_the_contract"),
    }
    assert promised <= passed and len(passed) >= 30, promised - passed


def run(command: str, *options: str) -> str:
    """What a command of the page prints."""
    assert f"    {command}\n" in PAGE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", *command.split(), *options]
    ended = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_command_of_the_page_takes_the_layer() -> None:
    assert "a fast and a slow memory" in run("fastweights mixers two-speed --import examples/own_rule/two_speed.py")
