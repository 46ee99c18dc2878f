"""What a measurement of a claim runs with, and that it cannot be made here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fastweights.checks import check_list, check_path, check_size, check_text, check_whole_number, describe_value
from fastweights.kinds import checked

__all__ = ["Conditions", "Unmeasured"]


class Unmeasured(Exception):
    """A measurement needs something that this machine does not have. The message says what, and how to get it."""


@checked
@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a measurement runs with.

    Attributes:
        seeds: of random numbers; the spread over them is reported.
        device: torch device.
        folder: for checkpoints and results of trainings, which continue from there after an interruption.
        measurements: folder of the benchmarks' result files, which claims about speed are read from.
        workers: processes that train at the same time; None for one per core or GPU.

    Raises:
        TypeError: an attribute of a wrong kind.
        ValueError: no seed, one that is negative or there twice, an unknown device, or a number of workers that is not positive.
    """

    seeds: tuple[int, ...]
    device: str = "cpu"
    folder: Path = Path("runs/claims/trained")
    measurements: Path = Path("studies/results")
    workers: int | None = None

    def __post_init__(self) -> None:
        seeds = check_list("seeds", self.seeds, "whole numbers")
        if not seeds or len(set(map(repr, seeds))) < len(seeds):
            raise ValueError(
                f"seeds must be a list of at least one seed, none of them twice, got {describe_value(self.seeds)}"
            )
        for seed in seeds:
            check_whole_number("seeds", seed)
        check_text("device", self.device, what="a torch device")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(
                f"device must be a torch device such as 'cpu' or 'cuda', got {describe_value(self.device)}"
            ) from None
        check_path("folder", self.folder)
        check_path("measurements", self.measurements)
        if self.workers is not None:
            check_size("workers", self.workers)
