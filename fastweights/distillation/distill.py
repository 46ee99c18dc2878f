"""A distillation from its run to its results, and what it will do before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from ..checks import describe_value
from ..data.text import PreparedText
from ..evaluation import EvaluationSettings, load_language_model
from ..kinds import checked
from ..results import LanguageResult
from ..results.distillation import load_distillation
from ..stopping import StopSignals
from ..training.calling_script import work_begins
from ..training.folder import as_stored
from ..training.language.folder import LanguageFolder
from ..training.language.joining import joined
from ..training.language.planning import plan_training
from ..training.language.processes import from_main_process, on_every_process, world_size
from ..training.language.stages import resolve
from ..training.language.texts import prepare_texts
from ..training.language.train import train_all
from ..training.language.trainer import held_out_sample
from .check import check_distillation
from .report import REPORT, compare_models
from .run import DistillRun
from .teacher import load_teacher
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
    """Train a student as `run` says, stage by stage, and measure it and its teacher on held-out text (`compare_models`).

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
    console = console or Console(quiet=True)
    with joined():
        run = on_every_process(lambda: check_distillation(run))
        results = train_all(run, stop_at, overwrite, console, signals or StopSignals(), DistillTrainer)
        if run.teacher and not from_main_process(results is None):
            stages: list[Any] = resolve(run, world_size())
            text = prepare_texts(run, stages, Console(quiet=True))[-1]
            if results is not None:
                _compare(run, stages[-1], text, results, console)
        return results


def _compare(
    run: DistillRun, last: DistillRun, text: PreparedText, results: Sequence[LanguageResult], console: Console
) -> None:
    """Measure the student of the last stage and the teacher, side by side, into distillation.json of the run's folder."""
    folder, device = Path(run.output), PartialState().device
    lengths = tuple(length for length in last.context_lengths if length <= len(text.held_out))
    settings = EvaluationSettings(
        measures=("perplexity", *last.needles) if lengths else (),
        lengths=lengths or (last.length,),
        texts=last.context_texts,
        seed=last.seed,
    )
    if (folder / REPORT).exists() and load_distillation(folder / REPORT).settings == as_stored(asdict(settings)):
        return
    student, tokenizer = load_language_model(results[-1].folder, device=str(device))
    curve, before = [], 0
    for result in results:
        curve += [(before + tokens, kl) for tokens, kl in zip(result.held_out_tokens, result.held_out_kls)]
        before += result.tokens
    with LanguageFolder(folder).locked():
        compare_models(
            student,
            load_teacher(last.teacher, last.teacher_dtype, device),
            tokenizer,
            rows=held_out_sample(last, text),
            documents=(text.held_out.document(number) for number in range(len(text.held_out.starts))),
            settings=settings,
            curve=curve,
            output=folder,
            console=console,
        )


def plan_distillation(
    run: DistillRun, *, stop_at: int | None = None, overwrite: bool = False, gpu: str | None = None
) -> dict[str, Any]:
    """What `plan_training` says of it, after the checks of `distill`."""
    return plan_training(check_distillation(run), stop_at=stop_at, overwrite=overwrite, gpu=gpu)
