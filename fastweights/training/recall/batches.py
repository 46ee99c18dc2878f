"""The batches of a recall run: fresh or from a fixed training set, stage after stage or stages in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ...data import stream
from .experiment import RecallRun

__all__ = ["training_batches"]


def training_batches(run: RecallRun, start: int) -> Iterator[Any]:
    """The batches of steps `start` to the last. A batch is a pure function of its step."""
    if run.mixture:
        stages = run.stages()
        for step in range(start, run.steps):
            stage, task = stages[run.stage_at(step)]
            yield task.batch("train", seed=run.seed, index=step, batch_size=stage.batch_size or run.batch_size)
        return
    first = 0
    for number, (stage, task) in enumerate(run.stages()):
        begin, end = max(start, first), first + stage.steps
        size = stage.batch_size or run.batch_size
        if begin >= end:
            pass
        elif run.train_examples is None:
            yield from stream(task, "train", seed=run.seed, batch_size=size, start=begin, stop=end)
        else:
            whole = task.batch("train", seed=run.seed, index=number, batch_size=run.train_examples)
            rounds = _rows_of_rounds(run, number, size)
            for rows in itertools.islice(rounds, begin - first, stage.steps):
                yield type(whole)(*(part[rows] for part in whole))
        first = end


def _rows_of_rounds(run: RecallRun, stage: int, size: int) -> Iterator[torch.Tensor]:
    """Rows of the batches of a fixed training set, in a new order each time round. What whole batches leave over waits for
    another round."""
    for number in itertools.count():
        seed = np.random.SeedSequence((run.seed, stage, number)).generate_state(1, np.uint64).item() >> 1
        order = torch.randperm(run.train_examples or 0, generator=torch.Generator().manual_seed(seed))
        yield from order[: len(order) // size * size].split(size)
