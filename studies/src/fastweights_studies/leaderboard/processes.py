"""Trains language models, and measures them, in processes of their own, several on one GPU or one per core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastweights.files import write_json
from fastweights.results.language import load_result
from fastweights.training.pool import Call, Pool, run_tasks

from .request import Request

__all__ = ["call_each", "has_ended", "train_models"]

RESULT, DIVERGED = "result.json", "diverged.json"


def train_models(runs: Sequence[Any], request: Request) -> None:
    """Train the `LanguageRun`s that have neither a result nor diverged. Each continues after its last checkpoint.

    With one worker they train in this process. Otherwise every training has a process, which a signal to this one or the end of
    it stops with a checkpoint.

    Raises:
        WorkerError: processes failed; the others have trained their models. The same call trains the missing ones.
    """
    from fastweights.training.language.together import train_here, train_together

    def ended(run: Any, why: str | None) -> None:
        if why is not None:
            folder = Path(run.output)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / DIVERGED, {"why": why})
        request.reporter.note(f"{run.output}: {'trained' if why is None else 'diverged'}")

    waiting = [run for run in runs if not has_ended(run)]
    trained = [run for run in waiting if (Path(run.output) / RESULT).exists()]  # only measured again
    here = waiting if request.processes() == 1 else trained
    for run in here:
        ended(run, train_here(run))
    if len(here) < len(waiting):
        there = [run for run in waiting if run not in here]
        train_together(there, request.processes(), request.device, request.imports, ended)


def has_ended(run: Any) -> bool:
    """Whether a training has diverged, or has a result with all context lengths of the run."""
    folder = Path(run.output)
    if not (folder / RESULT).exists():
        return (folder / DIVERGED).exists()
    return load_result(folder / RESULT).run["context_lengths"] == list(run.context_lengths)


def call_each(
    work: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], request: Request, ended: Callable[[str, Any], None]
) -> None:
    """Call `work` with the arguments of each job, in as many processes as the request has. A job that fails is lost alone.

    Args:
        work: a function of a module, with arguments and results that can be pickled.
        jobs: arguments by name.
        ended: called with the name and the result of a job as soon as it is done.

    Raises:
        WorkerError: at the end, if jobs failed.
        KeyboardInterrupt: Ctrl-C, or a signal where the caller has entered `StopSignals`. Calls that run are stopped at once.
    """
    pool = Pool(
        workers=request.processes(),
        devices=(request.device,),
        imports=request.imports,
        what="mixer",
        stop_seconds=0.0,  # they have nothing to save
    )
    run_tasks(
        [Call(name, work, arguments) for name, arguments in jobs.items()],
        pool,
        on_end=lambda worker, call, result: ended(call.name, result),
        on_failure=lambda call, error: request.reporter.note(str(error)),
    )
