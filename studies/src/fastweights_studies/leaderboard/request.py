"""What a run of the leaderboard is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fastweights.kinds import checked
from fastweights.layers import MixerChoice
from fastweights.training.pool import usual_workers
from fastweights.training.progress import Reporter, Silent

from ..record import WORD
from .entries import describe_label

__all__ = ["Request"]


@checked
@dataclass(frozen=True, kw_only=True)
class Request:
    """Which mixers, where, and how.

    Attributes:
        mixers: those that take part.
        size: a key of `SIZES`.
        device: torch device.
        output: folder of the boards, one file per part; trainings lie in it and continue from there.
        seeds: in place of the declared ones.
        columns: texts; a part that trains on tasks runs the columns with one of them in their titles. None runs all.
        workers: processes; None for as many as `usual_workers` says.
        imports: modules that register mixers, for the processes.

    Raises:
        ValueError: a label or an option that rows cannot keep.
    """

    mixers: tuple[MixerChoice, ...]
    size: str
    device: str
    output: Path
    seeds: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    workers: int | None = None
    imports: tuple[str, ...] = ()
    reporter: Reporter = field(default_factory=Silent)

    def __post_init__(self) -> None:
        for choice in self.mixers:
            for name, text in {**choice.options, **describe_label(choice)}.items():
                if isinstance(text, str) and not WORD.fullmatch(text):
                    raise ValueError(
                        f"{name} of mixer {choice.name!r} must have at most 80 characters and no spaces, as rows of results keep "
                        f"it, got {text!r}; choose another"
                    )

    @property
    def trainings(self) -> Path:
        """The folder of runs, checkpoints and models."""
        return self.output / "trained"

    def processes(self) -> int:
        """How many train at the same time."""
        return self.workers or usual_workers(self.device)
