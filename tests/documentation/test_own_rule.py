"""docs/own_rule.md and docs/tasks.md show the examples whose tests inherit the contract suite, and these pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOWN = {
    "own_rule": ["own_rule/two_speed.py", "own_package/fading/__init__.py", "own_package/fading/kernels.py"],
    "tasks": ["own_package/fading/look_back.py"],
}


def run(*arguments: str, **variables: str) -> str:
    """What a command prints, in a process of its own: the examples register mixers, ops and tasks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    ended = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def passed(folder: str, *options: str, **variables: str) -> set[str]:
    """The tests of an example that pass, by their functions; none fails."""
    pytest_options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-rA")
    printed = run("pytest", *pytest_options, str(EXAMPLES / folder), *options, **variables)
    return set(re.findall(r"^PASSED \S*::(\w+)", printed, re.MULTILINE))


@pytest.mark.parametrize("page", SHOWN)
def test_the_page_shows_the_files(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    for name in SHOWN[page]:
        assert (EXAMPLES / name).read_text() in blocks, name


def test_the_page_shows_the_project() -> None:
    project = (EXAMPLES / "own_package" / "pyproject.toml").read_text()
    assert f"```toml\n{project}```" in (ROOT / "docs" / "own_rule.md").read_text()


CONTRACT = {
    *("test_segments_are_the_whole", "test_chunked_is_sequential", "test_packed_is_separate", "test_gradcheck"),
    *("test_shapes", "test_bad_numbers_reach_what_depends_on_them_and_nothing_else", "test_fullgraph", "test_opcheck"),
    "test_divided_packed_is_whole",
    "test_the_layer_keeps_the_contract",
}


@pytest.mark.slow  # the fast set has the package in tests/house
@pytest.mark.parametrize(
    ("folder", "own"),
    [("own_rule", "test_one_memory_alone_is_linear_attention"), ("own_package", "test_padding_forgets_nothing")],
)
def test_the_rules_keep_the_contract(folder: str, own: str) -> None:
    found = passed(folder)
    assert {*CONTRACT, own} <= found and len(found) >= 30, CONTRACT - found


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("tests", ["read_segments", "kernels"])
def test_the_kernels_keep_the_contract(tests: str) -> None:
    assert len(passed("own_package", "-k", tests)) == (1 if tests != "kernels" else 6)


@pytest.mark.slow  # as in test_first_commands.py
def test_the_command_of_the_page_takes_the_layer() -> None:
    command = "fastweights mixers two-speed --import examples/own_rule/two_speed.py"
    assert f"    {command}\n" in (ROOT / "docs" / "own_rule.md").read_text()
    assert "a fast and a slow memory" in run(*command.split())
