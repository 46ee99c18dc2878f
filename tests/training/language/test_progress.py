"""What a user sees while a model is trained."""

import io

import pytest
from rich.console import Console

from fastweights.training.language import progress, train_language


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_lines_elsewhere(make_run, monkeypatch, terminal):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    train_language(make_run(), console=console)
    shown = console.file.getvalue()
    assert "gdn: step 8 of 8, loss" in shown and "tokens/s" in shown and "GB, held-out loss" in shown
    assert ("8/8  loss" in shown) == terminal
    assert ("step 5 of 8" in shown) != terminal
