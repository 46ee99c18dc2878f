"""The progress of trainings: bars on a terminal, plain lines elsewhere, with the time left in both."""

from __future__ import annotations

import datetime
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ..results import RecallResult

__all__ = ["LOG_EVERY", "Display", "Reporter", "RunsProgress", "Silent", "TimeLeft", "rate"]

LOG_EVERY = 100  # steps of a run between two lines where there is no terminal


class Reporter(Protocol):
    """Receives the progress of runs, as of `run_recall`, which enters it as a context manager while it trains. A run has a
    `title`, and a number of `steps` and of `tokens`."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: object) -> None: ...

    def note(self, line: str) -> None:
        """Something that a user should know. It may come before the reporter is entered."""

    def begin(self, pending: Sequence[Any], *, total: int) -> None:
        """These of `total` runs are left to train."""

    def step(self, worker: int, run: Any, step: int, loss: float | None, speed: float) -> None:
        """A worker has taken `step` steps of a run. loss: the latest; speed: steps per second."""

    def end(self, worker: int, run: Any, result: Any) -> None:
        """A worker has ended a run; a `RecallResult` of `run_recall`."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def note(self, line: str) -> None: ...

    def begin(self, pending: Sequence[Any], *, total: int) -> None: ...

    def step(self, worker: int, run: Any, step: int, loss: float | None, speed: float) -> None: ...

    def end(self, worker: int, run: Any, result: Any) -> None: ...


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

    def __init__(self, pending: Sequence[Any]) -> None:
        self.total = sum(run.tokens for run in pending)
        self._ended = 0
        self._current: dict[int, int] = {}

    def step(self, worker: int, run: Any, step: int) -> None:
        self._current[worker] = run.tokens * step // run.steps

    def end(self, worker: int, run: Any) -> None:
        self._current.pop(worker, None)
        self._ended += run.tokens

    @property
    def done(self) -> int:
        return self._ended + sum(self._current.values())


class Display:
    """Bars on a terminal, drawn while this is entered. Elsewhere there are lines alone, which its users print now and then."""

    def __init__(self, console: Console) -> None:
        self.is_terminal = console.is_terminal
        self._bars = _progress_bars(console)
        self._tasks: dict[Hashable, tuple[TaskID, Any]] = {}

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def print_line(self, text: str) -> None:
        """Print a line that stays, above the bars."""
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show_bar(
        self, key: Hashable, work: Any, *, total: float | None, done: float, note: str, title: str = ""
    ) -> None:
        """Show how much of `total` is done.

        Args:
            key: names the bar.
            work: what is done. Where it is another object than before, the bar starts again: a full one would show no time left.
            note, title: in parts, separated by ", ", of which a narrow terminal shows the first.
        """
        task, before = self._tasks.get(key) or (self._bars.add_task("", note=""), None)
        if before is not work:
            self._bars.reset(task, total=total)
            self._tasks[key] = task, work
        self._bars.update(task, description=title, completed=done, note=note)


class RunsProgress(Silent):
    """A bar for all runs and one for each worker; without a terminal one line for each finished run, and one for every
    `log_every` steps of a run."""

    def __init__(self, console: Console, log_every: int = LOG_EVERY) -> None:
        self._display, self._log_every = Display(console), log_every
        self._ended = self._total = 0
        self._work = _Work(())
        self._left: TimeLeft | None = None  # from the first step: workers take a while to start

    def __enter__(self) -> RunsProgress:
        self._display.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.__exit__()

    def note(self, line: str) -> None:
        self._display.print_line(line)

    def begin(self, pending: Sequence[Any], *, total: int) -> None:
        self._ended, self._total = total - len(pending), total
        self._work = _Work(pending)
        if not self._display.is_terminal:
            self.note(f"{len(pending)} of {total} runs to train")
        self._show_all()

    def step(self, worker: int, run: Any, step: int, loss: float | None, speed: float) -> None:
        self._work.step(worker, run, step)
        self._left = self._left or TimeLeft(self._work.done, self._work.total)
        rest = f"loss {'-' if loss is None else format(loss, '.3f')}, {rate(speed)} steps/s"
        note = f"{step:,}/{run.steps:,}, {rest}"
        self._display.show_bar(worker, run, title=run.title, total=run.steps, done=step, note=note)
        self._show_all()
        if not self._display.is_terminal and step % self._log_every == 0 and step < run.steps:
            self.note(f"{run.title}: step {step:,} of {run.steps:,}, {rest}{self._time_left()}")

    def end(self, worker: int, run: Any, result: Any) -> None:
        self._ended += 1
        self._work.end(worker, run)
        self._show_all()
        line = f"{run.title}: {_outcome(result)}"
        if not self._display.is_terminal:
            line = f"[{self._ended}/{self._total}] {line}, {result.wall_seconds:.1f} s{self._time_left()}"
        self.note(line)

    def _show_all(self) -> None:
        note = f"{self._ended} of {self._total} runs"
        self._display.show_bar(
            "all", self._work, title="all runs", total=self._work.total, done=self._work.done, note=note
        )

    def _time_left(self) -> str:
        done = self._ended == self._total
        return "" if done or self._left is None else f"; all runs: {self._left.after(self._work.done)} left"


def _progress_bars(console: Console) -> Progress:
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


def _outcome(result: RecallResult) -> str:
    if result.value is None:
        return f"diverged at step {result.stopped_at}"
    return f"{result.measure} {result.value:.3f}, loss {result.losses[-1]:.3f}"
