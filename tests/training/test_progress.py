"""Progress as a user sees it: lines where there is no terminal, bars where there is one."""

import io

import pytest
from rich.console import Console

from fastweights.training import progress
from fastweights.training.progress import BarReporter, LineReporter, reporter_for

from ..results.made_up import made_up
from .small import small_experiment

RUNS = small_experiment(mixers=("linear", "gdn")).runs()


def report_progress(reporter):
    """What `reporter` prints when one of two runs was done before, and the other is trained."""
    with reporter:
        reporter.begin(RUNS[1:], total=2)
        reporter.step(0, RUNS[1], 6, None, 100.0)
        reporter.step(0, RUNS[1], 12, 0.5, 100.0)
        reporter.end(0, RUNS[1], made_up("gdn", accuracy=0.75))


@pytest.fixture
def console():
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def test_lines_are_short_and_whole(console):
    report_progress(reporter_for(console))
    assert console.file.getvalue().splitlines() == [
        "1 of 2 runs to train",
        "[2/2] gdn, 2 pairs, lr 0.01, seed 0: accuracy 0.750, loss 1.000, 1.0 s",
    ]


def test_long_runs_give_a_sign_of_life(console, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    report_progress(LineReporter(console))
    assert "gdn, 2 pairs, lr 0.01, seed 0: step 6 of 12, loss -, 100 steps/s" in console.file.getvalue()


def test_a_diverged_run_is_named(console):
    reporter = LineReporter(console)
    reporter.begin(RUNS, total=2)
    reporter.end(0, RUNS[0], made_up(accuracy=None, stopped_at=7))
    assert "[1/2] linear, 2 pairs, lr 0.01, seed 0: diverged at step 7" in console.file.getvalue()


def test_bars_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    reporter = reporter_for(console)
    assert isinstance(reporter, BarReporter)
    report_progress(reporter)
    shown = console.file.getvalue()
    for text in ("all runs", "1 of 2 runs", "2 of 2 runs", "accuracy 0.750"):
        assert text in shown
