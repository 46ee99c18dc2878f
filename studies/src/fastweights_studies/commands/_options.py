"""Options of the commands that train many models."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.authoring import check_place, values
from fastweights_studies.timer import calling_after

__all__ = ["FEWER", "Minutes", "Workers", "check_trainings", "stopping_after"]

FEWER = "a smaller --workers"
Workers = Annotated[int | None, typer.Option(help="Trainings at the same time; by default one per core, or 8 per GPU.")]

Minutes = Annotated[
    float | None, typer.Option(help="Stop after so many minutes with everything kept; the same command continues.")
]


@contextmanager
def stopping_after(minutes: float | None) -> Iterator[None]:
    """Stop this process after so many minutes as a batch system does, by a signal that `StopSignals` takes: trainings save
    checkpoints first. None to let it end by itself."""
    from fastweights.checks import check_positive

    if minutes is None:
        yield
        return
    check_positive("--minutes", minutes)
    with calling_after(60 * minutes, os.kill, os.getpid(), signal.SIGUSR1):
        yield


def check_trainings(
    device: str, output: Path, workers: int | None, seeds: Sequence[str] | None
) -> tuple[int, ...] | None:
    """Check the options of a command that trains many models. Returns the values of --seeds, None where it is not given."""
    from fastweights.checks import check_device, check_size, check_whole_number  # here: help must not import torch

    check_device(device)
    check_place("--output", output)
    if workers is not None:
        check_size("--workers", workers, high=1024)
    if not seeds:
        return None
    given = values("--seeds", seeds, int)
    for seed in given:
        check_whole_number("--seeds", seed)
    if len(set(given)) < len(given):
        raise ValueError(
            f"--seeds must differ from each other, got {', '.join(map(str, given))}; drop what is there twice"
        )
    return given
