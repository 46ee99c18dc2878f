"""A distillation from its run to its results, and what it will do before it begins."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..checks import describe_value
from ..kinds import checked
from ..results import LanguageResult
from ..stopping import StopSignals
from ..training.calling_script import work_begins
from ..training.language.joining import joined
from ..training.language.planning import plan_training
from ..training.language.processes import on_every_process
from ..training.language.train import train_all
from .check import check_distillation
from .run import DistillRun
from .trainer import DistillTrainer

__all__ = ["distill", "plan_distillation"]


@checked
def distill(
    run: DistillRun,
    *,
    stop_at: int | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    signals: StopSignals | None = None,
) -> list[LanguageResult] | None:
    """Train a student as `run` says, stage by stage, and measure it and its teacher on held-out text.

    It is `train_language` with another loss: it continues after an interruption, in one process or several, from the same
    checkpoints, and its arguments and errors are those.

    Returns:
        One result per stage, in the main process; None if training has not ended (`stop_at`), or in another process.

    Raises:
        ValueError: also a student that is no hybrid, a teacher whose vocabulary or, where it matters, architecture is another
            one, or a tokenizer that is not the teacher's. Nothing has been trained.
    """
    work_begins("distill")
    if not isinstance(run, DistillRun):
        raise TypeError(
            f"run must be a DistillRun, got {describe_value(run)}; load_run(..., kind=DistillRun) reads one"
        )
    with joined():
        run = on_every_process(lambda: check_distillation(run))
        return train_all(
            run, stop_at, overwrite, console or Console(quiet=True), signals or StopSignals(), DistillTrainer
        )


def plan_distillation(
    run: DistillRun, *, stop_at: int | None = None, overwrite: bool = False, gpu: str | None = None
) -> dict[str, Any]:
    """What `plan_training` says of it, after the checks of `distill`."""
    return plan_training(check_distillation(run), stop_at=stop_at, overwrite=overwrite, gpu=gpu)
