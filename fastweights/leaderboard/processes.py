"""Trains language models in processes of their own, several on one GPU or one per core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from ..files import write_json
from ..stopping import StopSignals
from ..training import WorkerError
from .request import Request

__all__ = ["train_models"]

DIVERGED = "diverged.json"


def train_models(runs: Sequence[Any], request: Request) -> None:
    """Train the `LanguageRun`s that have neither a result nor diverged. Each continues after its last checkpoint.

    With one worker they train in this process. Otherwise every training has a process, which a signal to this one or the end of
    it stops with a checkpoint.

    Raises:
        WorkerError: processes failed; the others have trained their models. The same call trains the missing ones.
    """
    waiting = [run for run in reversed(runs) if not _ended(run)]
    if request.processes() == 1:
        for run in reversed(waiting):
            _train(run)
        return
    context = multiprocessing.get_context("spawn")
    gpus = torch.cuda.device_count() if torch.device(request.device).type == "cuda" else 0
    free = list(range(request.processes()))
    busy: dict[Any, tuple[Any, int, Any]] = {}
    failed = []
    try:
        while waiting or busy:
            while waiting and free:
                place, run = free.pop(0), waiting.pop()
                gpu = place % gpus if gpus else None
                process = context.Process(target=_work, args=(run, gpu, request.imports))
                process.start()
                busy[process.sentinel] = (process, place, run)
            for sentinel in wait(list(busy)):
                process, place, run = busy.pop(sentinel)
                process.join()
                free.append(place)
                if process.exitcode:
                    failed.append(run.output)
                else:
                    request.reporter.note(f"{run.output}: {'trained' if not _has_diverged(run) else 'diverged'}")
    finally:
        for process, _, _ in busy.values():
            process.terminate()
        for process, _, _ in busy.values():
            process.join()
    if failed:
        raise WorkerError(f"{len(failed)} of {len(runs)} trainings failed, the first in {failed[0]}")


def _work(run: Any, gpu: int | None, imports: Sequence[str]) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    else:
        torch.set_num_threads(1)
    if imports:
        from ..layers import import_mixers

        import_mixers(imports)
    try:
        _train(run)
    except KeyboardInterrupt:  # or a signal: the checkpoint is written
        raise SystemExit(130) from None


def _train(run: Any) -> None:
    from transformers.utils.logging import disable_progress_bar

    from ..training.language import NonFiniteLoss, train_language

    disable_progress_bar()  # one per saved file
    try:
        with StopSignals() as signals:
            train_language(run, signals=signals)
    except NonFiniteLoss as error:
        Path(run.output).mkdir(parents=True, exist_ok=True)
        write_json(Path(run.output) / DIVERGED, {"why": str(error)})


def _has_diverged(run: Any) -> bool:
    return (Path(run.output) / DIVERGED).exists()


def _ended(run: Any) -> bool:
    return (Path(run.output) / "result.json").exists() or _has_diverged(run)
