"""Recall trainings that a claim changes and watches: nothing is kept of them but the numbers that the claim takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastweights.training import RecallRun
from fastweights.training.pool import Call, Pool, run_tasks, usual_workers
from fastweights.training.recall.batches import training_batches
from fastweights.training.recall.objectives import Objective
from fastweights.training.recall.train import Training

from .conditions import Conditions

__all__ = ["in_processes", "largest_spike", "train_watched"]

BEFORE = 20  # steps whose median a spike is measured by
Job = TypeVar("Job")
Found = TypeVar("Found")


def train_watched(
    run: RecallRun, change: Callable[[Any], None], objective: Objective | None = None
) -> tuple[Training, list[float]]:
    """Trains the model that `change` has changed, with the objective of its task or another one: the training at its end, and
    the norm of the gradients at every step, before they were scaled down. It ends early where the loss is no longer finite."""
    training, norms = Training(run, uses_graphs=False, change=change), []
    if objective is not None:
        training.objectives = [objective]
    for batch in training_batches(run, 0):
        training.step(batch)
        norms.append(training.take.gradient_norm.item())
        if training.history.diverged:
            break
    return training, norms


def largest_spike(norms: Sequence[float]) -> float:
    """The largest ratio of a gradient's norm to the median of the `BEFORE` steps before it; 1 where there are no more steps."""
    ratios = (norms[step] / statistics.median(norms[step - BEFORE : step]) for step in range(BEFORE, len(norms)))
    return max(ratios, default=1.0)


def in_processes(measure: Callable[[Job], Found], jobs: Sequence[Job], conditions: Conditions) -> list[Found]:
    """`measure` of every job, in as many processes as the conditions allow, each of one thread.

    Raises:
        WorkerError: a job failed.
    """
    tasks = [Call(str(place), measure, (job,)) for place, job in enumerate(jobs)]
    found: dict[str, Found] = {}

    def keep(worker: int, task: Call, result: Found) -> None:
        found[task.name] = result

    workers = conditions.workers or usual_workers(conditions.device)
    run_tasks(tasks, Pool(workers=workers, devices=(conditions.device,), what="training"), on_end=keep)
    return [found[task.name] for task in tasks]
