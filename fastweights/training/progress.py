"""The progress of recall runs: bars on a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..results import RecallResult
from .experiment import RecallRun

__all__ = ["BarReporter", "LineReporter", "Reporter", "Silent", "progress_bars", "reporter_for"]

_LINE_SECONDS = 30.0


class Reporter(Protocol):
    """Receives the progress of `run_recall`, which enters it as a context manager while it trains."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: object) -> None: ...

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

    def begin(self, pending: Sequence[RecallRun], *, total: int) -> None: ...

    def step(self, worker: int, run: RecallRun, step: int, loss: float | None, speed: float) -> None: ...

    def end(self, worker: int, run: RecallRun, result: RecallResult) -> None: ...


class LineReporter(Silent):
    """One line for each finished run, and the progress of a run every 30 seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ended = self._total = 0
        self._last_line = time.monotonic()

    def begin(self, pending: Sequence[RecallRun], *, total: int) -> None:
        self._ended, self._total = total - len(pending), total
        self._print(f"{len(pending)} of {total} runs to train")

    def step(self, worker: int, run: RecallRun, step: int, loss: float | None, speed: float) -> None:
        if time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._print(f"{run.title}: step {step} of {run.steps}, loss {_number(loss)}, {speed:.0f} steps/s")

    def end(self, worker: int, run: RecallRun, result: RecallResult) -> None:
        self._ended += 1
        self._print(f"[{self._ended}/{self._total}] {run.title}: {_outcome(result)}, {result.wall_seconds:.1f} s")

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class BarReporter(Silent):
    """A bar for the whole experiment and one for each worker."""

    def __init__(self, console: Console) -> None:
        self._progress = progress_bars(console)
        self._all = self._progress.add_task("all runs", note="")
        self._bars: dict[int, TaskID] = {}
        self._ended = self._total = 0
        self._ended_work = 0
        self._current_work: dict[int, int] = {}

    def __enter__(self) -> "BarReporter":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, pending: Sequence[RecallRun], *, total: int) -> None:
        self._ended, self._total = total - len(pending), total
        self._progress.update(self._all, total=sum(run.tokens for run in pending))
        self._show_all()

    def step(self, worker: int, run: RecallRun, step: int, loss: float | None, speed: float) -> None:
        if worker not in self._bars:
            self._bars[worker] = self._progress.add_task("", note="")
        note = f"step {step}/{run.steps}  loss {_number(loss)}  {speed:.0f} steps/s"
        self._progress.update(self._bars[worker], description=run.title, completed=step, total=run.steps, note=note)
        self._current_work[worker] = run.tokens * step // run.steps
        self._show_all()

    def end(self, worker: int, run: RecallRun, result: RecallResult) -> None:
        self._ended += 1
        self._ended_work += run.tokens
        self._current_work.pop(worker, None)
        self._progress.console.print(f"{run.title}: {_outcome(result)}", markup=False, highlight=False)
        self._show_all()

    def _show_all(self) -> None:
        work = self._ended_work + sum(self._current_work.values())
        self._progress.update(self._all, completed=work, note=f"{self._ended} of {self._total} runs")


def progress_bars(console: Console) -> Progress:
    """Bars with description, a note (a field of every task), time taken and time left; nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def reporter_for(console: Console) -> Reporter:
    """Bars if the console is a terminal, else lines."""
    return BarReporter(console) if console.is_terminal else LineReporter(console)


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def _outcome(result: RecallResult) -> str:
    if result.accuracy is None:
        return f"diverged at step {result.stopped_at}"
    return f"accuracy {result.accuracy:.3f}, loss {_number(result.losses[-1])}"
