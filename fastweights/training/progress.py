"""The progress of recall runs: bars on a terminal, plain lines elsewhere, with the time left in both."""

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ..results import RecallResult
from .experiment import RecallRun

__all__ = [
    "LOG_EVERY",
    "BarReporter",
    "LineReporter",
    "Reporter",
    "Silent",
    "TimeLeft",
    "progress_bars",
    "rate",
    "reporter_for",
]

LOG_EVERY = 100  # steps of a run between two lines where there is no terminal


class Reporter(Protocol):
    """Receives the progress of `run_recall`, which enters it as a context manager while it trains."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: object) -> None: ...

    def note(self, line: str) -> None:
        """Something that a user should know. It may come before the reporter is entered."""

    def begin(self, pending: Sequence[RecallRun], *, total: int) -> None:
        """These of `total` runs are left to train."""

    def step(self, worker: int, run: RecallRun, step: int, loss: float | None, speed: float) -> None:
        """A worker has taken `step` steps of a run; the latest loss in nats, and steps per second."""

    def end(self, worker: int, run: RecallRun, result: RecallResult) -> None:
        """A worker has ended a run."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def note(self, line: str) -> None: ...

    def begin(self, pending: Sequence[RecallRun], *, total: int) -> None: ...

    def step(self, worker: int, run: RecallRun, step: int, loss: float | None, speed: float) -> None: ...

    def end(self, worker: int, run: RecallRun, result: RecallResult) -> None: ...


class TimeLeft:
    """The time that work will still take at its speed so far. `done` and `total` count it in any unit."""

    def __init__(self, done: float, total: float) -> None:
        self._began, self._first, self._total = time.monotonic(), done, total

    def after(self, done: float) -> str:
        """As h:mm:ss, where `done` of the work is done."""
        if done <= self._first:
            return "-:--:--"
        seconds = (time.monotonic() - self._began) * (self._total - done) / (done - self._first)
        return str(datetime.timedelta(seconds=round(max(0.0, seconds))))


class _Work:
    """The part of an experiment that is done, in tokens: runs differ in length."""

    def __init__(self, pending: Sequence[RecallRun]) -> None:
        self.total = sum(run.tokens for run in pending)
        self._ended = 0
        self._current: dict[int, int] = {}

    def step(self, worker: int, run: RecallRun, step: int) -> None:
        self._current[worker] = run.tokens * step // run.steps

    def end(self, worker: int, run: RecallRun) -> None:
        self._current.pop(worker, None)
        self._ended += run.tokens

    @property
    def done(self) -> int:
        return self._ended + sum(self._current.values())


class LineReporter(Silent):
    """One line for each finished run, and one for every `log_every` steps of a run."""

    def __init__(self, console: Console, log_every: int = LOG_EVERY) -> None:
        self._console, self._log_every = console, log_every
        self._ended = self._total = 0
        self._work = _Work(())
        self._left: TimeLeft | None = None  # from the first step: workers take a while to start

    def note(self, line: str) -> None:
        self._print(line)

    def begin(self, pending: Sequence[RecallRun], *, total: int) -> None:
        self._ended, self._total = total - len(pending), total
        self._work = _Work(pending)
        self._print(f"{len(pending)} of {total} runs to train")

    def step(self, worker: int, run: RecallRun, step: int, loss: float | None, speed: float) -> None:
        self._work.step(worker, run, step)
        self._left = self._left or TimeLeft(self._work.done, self._work.total)
        if step % self._log_every == 0 and step < run.steps:
            steps = f"step {step:,} of {run.steps:,}, loss {_number(loss)}, {rate(speed)} steps/s"
            self._print(f"{run.title}: {steps}{self._time_left()}")

    def end(self, worker: int, run: RecallRun, result: RecallResult) -> None:
        self._ended += 1
        self._work.end(worker, run)
        outcome = f"{_outcome(result)}, {result.wall_seconds:.1f} s{self._time_left()}"
        self._print(f"[{self._ended}/{self._total}] {run.title}: {outcome}")

    def _time_left(self) -> str:
        done = self._ended == self._total
        return "" if done or self._left is None else f"; all runs: {self._left.after(self._work.done)} left"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class BarReporter(Silent):
    """A bar for the whole experiment and one for each worker."""

    def __init__(self, console: Console) -> None:
        self._progress = progress_bars(console)
        self._all = self._progress.add_task("all runs", note="")
        self._bars: dict[int, TaskID] = {}
        self._runs: dict[int, RecallRun] = {}  # what each worker trains
        self._ended = self._total = 0
        self._work = _Work(())

    def __enter__(self) -> "BarReporter":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def note(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def begin(self, pending: Sequence[RecallRun], *, total: int) -> None:
        self._ended, self._total = total - len(pending), total
        self._work = _Work(pending)
        self._progress.update(self._all, total=self._work.total)
        self._show_all()

    def step(self, worker: int, run: RecallRun, step: int, loss: float | None, speed: float) -> None:
        if worker not in self._bars:
            self._bars[worker] = self._progress.add_task("", note="")
        if self._runs.get(worker) is not run:  # a bar that was full would stay so, with no time left
            self._runs[worker] = run
            self._progress.reset(self._bars[worker], total=run.steps)
        note = f"{step:,}/{run.steps:,}, loss {_number(loss)}, {rate(speed)} steps/s"
        self._progress.update(self._bars[worker], description=run.title, completed=step, note=note)
        self._work.step(worker, run, step)
        self._show_all()

    def end(self, worker: int, run: RecallRun, result: RecallResult) -> None:
        self._ended += 1
        self._work.end(worker, run)
        self._progress.console.print(f"{run.title}: {_outcome(result)}", markup=False, highlight=False)
        self._show_all()

    def _show_all(self) -> None:
        self._progress.update(self._all, completed=self._work.done, note=f"{self._ended} of {self._total} runs")


def progress_bars(console: Console) -> Progress:
    """Bars with description, a note (a field of every task) and time left; nothing where there is no terminal.

    Bar and time left keep their width on a narrow terminal. Of description and note, whose parts are separated by ", ", the first
    parts are shown, as many as there is room for.
    """
    bar = 24 if console.width > 100 else 10
    left = min(60, (console.width - bar - 15) * 3 // 5)  # for the description; 15 for the time left and gaps
    return Progress(
        _Parts("description", table_column=Column(no_wrap=True, max_width=left)),
        BarColumn(bar_width=bar),
        _Parts("note", table_column=Column(no_wrap=True, ratio=1)),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        expand=True,
        transient=True,
        disable=not console.is_terminal,
    )


class _Parts(ProgressColumn):
    """A text of a task that fits its column by leaving out its last parts."""

    def __init__(self, name: str, table_column: Column) -> None:
        super().__init__(table_column)
        self._name = name

    def render(self, task: Task) -> RenderableType:
        return _FirstParts(task.description if self._name == "description" else task.fields[self._name])


@dataclass(frozen=True)
class _FirstParts:
    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self.text.split(", ")
        while len(parts) > 1 and cell_len(", ".join(parts)) > options.max_width:
            parts.pop()
        yield Text(", ".join(parts), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, cell_len(self.text)).with_maximum(options.max_width)


def rate(speed: float) -> str:
    """How much is done in a second: 456, 3.2, 0.04."""
    return f"{speed:,.0f}" if speed >= 9.95 else f"{speed:.2g}"


def reporter_for(console: Console, log_every: int = LOG_EVERY) -> Reporter:
    """Bars if the console is a terminal, else lines."""
    return BarReporter(console) if console.is_terminal else LineReporter(console, log_every)


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def _outcome(result: RecallResult) -> str:
    if result.value is None:
        return f"diverged at step {result.stopped_at}"
    return f"{result.measure} {result.value:.3f}, loss {_number(result.losses[-1])}"
