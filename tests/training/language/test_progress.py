"""What a user sees while a model is trained."""

import io
import re

import pytest
from rich.console import Console
from transformers import TrainerState

from fastweights.training.language import train_language
from fastweights.training.language.progress import TextProgress, TrainingProgress
from fastweights.training.language.schedule import StepPlan


@pytest.mark.parametrize("terminal", [True, pytest.param(False, marks=pytest.mark.slow)])
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


def test_a_line_has_the_held_out_loss_of_its_step_alone(make_run):
    """It is measured after steps 4 and 8; the loss of step 6 is not beside that of step 4."""
    run, console = make_run(log_every=2), Console(file=io.StringIO(), width=200)
    (result,) = train_language(run, console=console)
    lines = [line for line in console.file.getvalue().splitlines() if "held-out loss" in line]
    assert result.held_out_steps == [4, 8]
    middle, last = (f"held-out loss {loss:.3f}" for loss in result.held_out_losses)
    assert lines[0] == f"gdn: step 4 of 8, {middle}" and len(lines) == 2
    assert re.fullmatch(rf"gdn: step 8 of 8, loss \d\.\d+, {last}, [\d,.]+ tokens/s, [\d.]+ GB", lines[1])


def test_a_bar_names_the_step_of_an_earlier_held_out_loss():
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    progress = TrainingProgress(console, title="gdn", plan=StepPlan(((8, 1),), 1, 64), log_every=2)
    notes = []
    for step, logs in ((4, {"loss": 5.5}), (4, {"eval_loss": 5.25}), (6, {"loss": 4.5})):
        progress.on_log(None, TrainerState(global_step=step), None, logs)
        notes.append(re.sub(r", [\d,]+ tokens/s.*", "", progress._display._bars.tasks[0].fields["note"]))
    assert notes == [
        "4/8, loss 5.500",
        "4/8, loss 5.500, held-out loss 5.250",
        "6/8, loss 4.500, held-out loss 5.250 at step 4",
    ]


class Clock:
    def __init__(self, step):
        self.now, self.step = 0.0, step

    def monotonic(self):
        self.now += self.step
        return self.now


def test_text_has_lines_from_the_start_every_ten_seconds(monkeypatch):
    console = Console(file=io.StringIO(), width=200)
    with TextProgress(console) as progress:
        for work in ("training a tokenizer", "tokenizing the text"):
            with monkeypatch.context() as clock:
                clock.setattr("fastweights.training.language.progress.time", Clock(0.0))
                progress(work, 0, 5_000_000)
                clock.setattr("fastweights.training.language.progress.time", Clock(4.0))
                for done in range(1, 6):
                    progress(work, done * 1_000_000, 5_000_000)
    lines = console.file.getvalue().splitlines()
    assert [re.sub("[^,]* left", "... left", line) for line in lines] == [
        f"{work}: {note}"
        for work in ("training a tokenizer", "tokenizing the text")
        for note in ("0.0 of about 5.0 MB", "3.0 of about 5.0 MB,... left")
    ]


@pytest.mark.parametrize("total", [5_000_000, None])
def test_text_has_a_bar_on_a_terminal(total):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with TextProgress(console) as progress:
        progress("tokenizing the text", 0, total)
        begun = len(console.file.getvalue())
        progress("tokenizing the text", 4_000_000, total)
    assert begun > 0 and "tokenizing the text" in console.file.getvalue()
    assert ("4.0 of about 5.0 MB" if total else "4.0 MB") in console.file.getvalue()


def test_a_training_reads_its_text_in_sight(make_run, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    train_language(make_run(cache=str(tmp_path / "new"), max_steps=1, context_lengths=()), console=console)
    shown = console.file.getvalue()
    works = [
        r"training a tokenizer: 0\.0 of about 0\.\d MB\n",
        r"trained a tokenizer",
        r"tokenizing the text: 0\.0 of",
        "tokenized",
    ]
    places = [re.search(work, shown).start() for work in works]
    assert places == sorted(places)
