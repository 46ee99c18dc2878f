"""Options of the commands that train many models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.authoring import check_place, values

__all__ = ["FEWER", "Workers", "check_trainings"]

FEWER = "a smaller --workers"
Workers = Annotated[int | None, typer.Option(help="Trainings at the same time; by default one per core, or 8 per GPU.")]


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
