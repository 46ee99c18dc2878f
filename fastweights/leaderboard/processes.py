"""Trains language models in processes of their own, several on one GPU or one per core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_json
from .request import Request

__all__ = ["has_ended", "train_models"]

DIVERGED = "diverged.json"


def train_models(runs: Sequence[Any], request: Request) -> None:
    """Train the `LanguageRun`s that have neither a result nor diverged. Each continues after its last checkpoint.

    With one worker they train in this process. Otherwise every training has a process, which a signal to this one or the end of
    it stops with a checkpoint.

    Raises:
        WorkerError: processes failed; the others have trained their models. The same call trains the missing ones.
    """
    from ..training.language.together import train_here, train_together

    def ended(run: Any, why: str | None) -> None:
        if why is not None:
            folder = Path(run.output)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / DIVERGED, {"why": why})
        request.reporter.note(f"{run.output}: {'trained' if why is None else 'diverged'}")

    waiting = [run for run in runs if not has_ended(run)]
    if request.processes() == 1:
        for run in waiting:
            ended(run, train_here(run))
    else:
        train_together(waiting, request.processes(), request.device, request.imports, ended)


def has_ended(run: Any) -> bool:
    """Whether a training has a result or has diverged."""
    return any((Path(run.output) / name).exists() for name in ("result.json", DIVERGED))
