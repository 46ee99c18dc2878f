"""The one engine of trainings: runs of any kind, each from its latest checkpoint to its result, in the processes of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .pool import Pool, Task, run_tasks
from .progress import Reporter

__all__ = ["Job", "train_jobs"]


class Job(Task, Protocol):
    """A run and its place on the disk.

    A call trains the run from its latest checkpoint, if there is one, to its result, which it writes and returns. Where the
    worker is asked to stop, it saves a checkpoint and returns None. It may report the steps taken, the latest loss and the steps
    per second.
    """

    @property
    def run(self) -> Any:
        """The configuration."""

    @property
    def cost(self) -> float:
        """How long the run takes, beside that of other runs, in any unit."""

    def has_ended(self) -> bool:
        """Whether its result is there."""


def train_jobs(jobs: Sequence[Job], pool: Pool, reporter: Reporter) -> None:
    """Train all runs that have not ended, the longest first, to end together. The same call continues after an interruption.

    Raises:
        WorkerError, KeyboardInterrupt: as `run_tasks`.
    """
    pending = [job for job in jobs if not job.has_ended()]
    if not pending:
        return
    with reporter:
        reporter.begin([job.run for job in pending], total=len(jobs))
        run_tasks(
            sorted(pending, key=lambda job: -job.cost),
            pool,
            on_report=lambda worker, job, step: reporter.step(worker, job.run, *step),
            on_end=lambda worker, job, result: reporter.end(worker, job.run, result),
            on_failure=lambda job, error: reporter.note(str(error)),
        )
