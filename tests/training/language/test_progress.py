"""What a user sees while a model is trained."""

import io
import re

import pytest
from rich.console import Console

from fastweights.training.language import train_language


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_a_line_every_log_every_steps_elsewhere(make_run, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    train_language(make_run(log_every=2), console=console)  # a checkpoint after step 3 logs the loss too
    shown = console.file.getvalue()
    assert "gdn: step 8 of 8, loss" in shown and "tokens/s" in shown and re.search(r"held-out loss .* GB\n", shown)
    assert ("8/8, loss" in shown) == terminal
    steps = re.findall(r"gdn: step (\d) of 8, loss \d.*, (\d:\d\d:\d\d) left\n", shown)
    assert [step for step, _ in steps] == ([] if terminal else ["2", "4", "6"])


def test_bar_and_time_left_fit_80_columns(make_run):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    train_language(make_run(), console=console)
    bars = [
        line
        for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", console.file.getvalue()))
        if "━" in line
    ]
    assert bars and all(len(line) <= 80 and sum(map(line.count, "━╸╺")) == 10 for line in bars)
    assert all(re.search(r"[\d-]:[\d-]{2}:[\d-]{2} left *$", line) for line in bars)
    assert any("8/8, loss" in line for line in bars)
