"""Trains language models at the same time, each in a process of its own: one of them alone leaves most of a GPU idle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from ...stopping import StopSignals
from ..calling_script import work_begins
from ..engine import train_jobs
from ..pool import Pool, Worker
from ..progress import Silent
from .folder import LanguageFolder
from .run import LanguageRun
from .train import NonFiniteLoss, train_language

__all__ = ["LanguageJob", "train_here", "train_together"]

LESS_MEMORY = "a smaller batch_size, or fewer workers,"
STOP_SECONDS = 120.0  # a step and a checkpoint


@dataclass(frozen=True)
class LanguageJob:
    """The training of a single model in its output folder. Its result is why the loss was no longer finite, or None."""

    run: LanguageRun

    @property
    def name(self) -> str:
        return self.run.output

    @property
    def cost(self) -> int:
        plan = self.run.plan(processes=1)
        return plan.tokens(plan.steps)

    def has_ended(self) -> bool:
        return LanguageFolder(Path(self.run.output)).result.exists()

    def __call__(self, worker: Worker) -> str | None:
        with StopSignals() as signals, worker.requests_as_signals():
            return _train(self.run, signals)


def report_divergence(run: LanguageRun, why: str | None) -> None:
    """A line to stderr where a training has diverged."""
    if why is not None:
        print(f"{run.output}: {why}", file=sys.stderr)


def train_together(
    runs: Sequence[LanguageRun],
    workers: int,
    device: str,
    imports: Sequence[str] = (),
    ended: Callable[[LanguageRun, str | None], None] = report_divergence,
) -> set[str]:
    """Train every run that has no result, `workers` at a time. The same call continues after an interruption.

    Args:
        workers: processes.
        device: "cuda" stands for all GPUs, over which the runs are spread; "cuda:1" for that one.
        imports: modules that register mixers, for the processes.
        ended: called with a run whose process has ended without a failure, and why its loss was no longer finite, or None.

    Returns:
        The output folders of trainings whose loss became infinite or NaN.

    Raises:
        WorkerError: other trainings have failed. All that did not have been trained.
        KeyboardInterrupt: Ctrl-C, or a signal where the caller has entered `StopSignals`. The trainings have saved checkpoints.
    """
    work_begins("train_together")
    diverged = set()

    class Ended(Silent):
        def end(self, worker: int, run: LanguageRun, result: str | None) -> None:
            if result is not None:
                diverged.add(run.output)
            ended(run, result)

    pool = Pool(
        workers=workers,
        devices=(device,),
        imports=imports,
        what="training",
        less_memory=LESS_MEMORY,
        one_gpu=True,
        renewed=True,
        stop_seconds=STOP_SECONDS,
    )
    train_jobs([LanguageJob(run) for run in runs], pool, Ended())
    return diverged


def train_here(run: LanguageRun) -> str | None:
    """Train in this process. Returns why the loss was no longer finite, or None."""
    with StopSignals() as signals:
        return _train(run, signals)


def _train(run: LanguageRun, signals: StopSignals) -> str | None:
    disable_progress_bar()  # one per saved file
    try:
        train_language(run, signals=signals)
    except NonFiniteLoss as error:
        return str(error)
    return None
