"""Progress as a user sees it: lines where there is no terminal, bars where there is one."""

import io
import re

import pytest
from rich.console import Console

from fastweights.layers import MixerChoice
from fastweights.training import progress
from fastweights.training.progress import RunsProgress, TimeLeft

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
    report_progress(RunsProgress(console))
    assert console.file.getvalue().splitlines() == [
        "1 of 2 runs to train",
        "[2/2] gdn, 2 pairs, lr 0.01, seed 0: accuracy 0.750, loss 1.000, 1.0 s",
    ]


def test_a_line_for_every_log_every_steps_with_the_time_left(console, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    reporter = RunsProgress(console, log_every=4)
    reporter.begin(RUNS, total=2)
    for step in range(1, 13):
        now[0] += 10.0
        reporter.step(0, RUNS[0], step, 0.5, 0.1)
    reporter.end(0, RUNS[0], made_up("linear", accuracy=0.75))
    title = "linear, 2 pairs, lr 0.01, seed 0"
    assert console.file.getvalue().splitlines() == [
        "2 of 2 runs to train",
        f"{title}: step 4 of 12, loss 0.500, 0.1 steps/s; all runs: 0:03:20 left",  # 20 of 24 steps at 10 seconds
        f"{title}: step 8 of 12, loss 0.500, 0.1 steps/s; all runs: 0:02:40 left",
        f"[1/2] {title}: accuracy 0.750, loss 1.000, 1.0 s; all runs: 0:02:00 left",
    ]


def test_time_left_before_anything_is_done():
    assert TimeLeft(3, 10).after(3) == "-:--:--"


def test_a_diverged_run_is_named(console):
    reporter = RunsProgress(console)
    reporter.begin(RUNS, total=2)
    reporter.end(0, RUNS[0], made_up(accuracy=None, stopped_at=7))
    assert "[1/2] linear, 2 pairs, lr 0.01, seed 0: diverged at step 7" in console.file.getvalue()


def test_bars_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    reporter = RunsProgress(console)
    report_progress(reporter)
    shown = console.file.getvalue()
    for text in ("all runs", "1 of 2 runs", "2 of 2 runs", "accuracy 0.750"):
        assert text in shown


def shown(console, reporter):
    """The bars as they are drawn at this moment, without control sequences."""
    console.file = io.StringIO()
    console.print(reporter._display._bars.get_renderable())
    return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", console.file.getvalue()).splitlines()


LONG_NAME = MixerChoice("gdn", {"conv_size": 2, "expand_v": 2})


def drawn(width, choice=LONG_NAME):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    reporter = RunsProgress(console)
    runs = small_experiment(mixers=(choice,), steps=1000).runs()
    reporter.begin(runs, total=1)
    reporter.step(0, runs[0], 123, 1.2345, 456.0)
    return shown(console, reporter)


@pytest.mark.parametrize("width", [80, 60, 200])
def test_bar_and_time_left_keep_their_place_on_a_narrow_terminal(width):
    lines = drawn(width)
    assert len(lines) == 2 and all(len(line) <= width for line in lines)
    for line in lines:
        assert sum(map(line.count, "━╸╺")) == (24 if width == 200 else 10)
        assert re.search(r"(\d+|-):(\d\d|--):(\d\d|--) left *$", line)
    assert width < 80 or "123/1,000, loss 1.234" in lines[1]


@pytest.mark.parametrize(
    ("width", "description", "note"),
    [
        (200, "palimpsa-d, 2 pairs, lr 0.01, seed 0", "123/1,000, loss 1.234, 456 steps/s"),
        (80, "palimpsa-d, 2 pairs, lr 0.01", "123/1,000, loss 1.234"),
        (60, "palimpsa-d, 2 pairs", "123/1,000"),
    ],
)
def test_a_narrow_bar_leaves_out_whole_parts(width, description, note):
    every, one = drawn(width, MixerChoice("palimpsa-d"))
    assert re.fullmatch(rf"{description} +[━╸╺]+ {note} +-:--:-- left *", one)
    assert "0 of 1 runs" in every and "…" not in every


def test_a_name_that_fits_no_column_is_cut():
    assert drawn(60, MixerChoice("gdn", {"conv_size": 2, "expand_v": 2, "negative_eigenvalues": True}))[1].startswith(
        "gdn:conv_size=2,expa…"
    )


@pytest.mark.parametrize("same_title", [False, True])
def test_the_second_run_of_a_worker_has_time_left(same_title):
    """The bar of a worker was full at the end of its run before."""
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=120, get_time=lambda: now[0])
    reporter = RunsProgress(console)
    runs = small_experiment(mixers=("linear", "gdn")).runs()
    if same_title:  # of another part
        runs = [runs[0], *small_experiment(mixers=("linear",)).runs()]
    reporter.begin(runs, total=2)
    for run in runs:
        for step in (1, 4, 8):
            now[0] += 6.0
            reporter.step(0, run, step, 0.5, 0.1)
        left = re.search(r"(\S+) left", shown(console, reporter)[1])[1]
        assert left == "0:00:07", run.title  # 4 steps, where 7 took 12 s
        reporter.step(0, run, 12, 0.5, 0.1)
        assert re.search("0:00:00 left", shown(console, reporter)[1])
        reporter.end(0, run, made_up(run.choice.label, accuracy=0.75))


@pytest.mark.parametrize(
    ("speed", "words"),
    [(12345.6, "12,346"), (456.4, "456"), (9.96, "10"), (9.94, "9.9"), (0.5, "0.5"), (0.0421, "0.042")],
)
def test_slow_steps_are_not_none(speed, words):
    assert progress.rate(speed) == words
