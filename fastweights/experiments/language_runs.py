"""Trains language models at the same time, each in a process of its own: one of them alone leaves most of a GPU idle."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from ..results import LanguageResult
from ..results.language import load_result
from ..stopping import Stopped, StopSignals
from ..training import WorkerError
from ..training.language import LanguageRun, NonFiniteLoss, train_language
from ..training.language.callbacks import read_log
from ..training.language.folder import LanguageFolder

__all__ = ["gradient_norms", "language_result", "train_together"]

DIVERGED = 3  # exit code of a training whose loss was not finite
STOP_SECONDS = 120.0  # a step and a checkpoint


def train_together(runs: Sequence[LanguageRun], workers: int, device: str) -> set[str]:
    """Train every run that has not ended, `workers` at a time. The device "cuda" stands for all GPUs, over which they are spread;
    "cuda:1" for that one. The same call continues after an interruption.

    Returns the output folders of trainings whose loss became infinite or NaN.

    Raises:
        WorkerError: other trainings have failed. All that did not have been trained.
        KeyboardInterrupt: Ctrl-C, or a signal where the caller has entered `StopSignals`. The trainings have saved checkpoints.
    """
    context = multiprocessing.get_context("spawn")  # a forked CUDA does not work
    waiting = [run for run in runs if not LanguageFolder(Path(run.output)).result.exists()]
    gpus = _gpus(torch.device(device))
    places = [gpus[index % len(gpus)] for index in range(workers)]
    running: dict[Any, tuple[Any, LanguageRun, str | None]] = {}
    diverged, failed = set(), []
    try:
        while waiting or running:
            while waiting and places:
                run, gpu = waiting.pop(0), places.pop(0)
                process = context.Process(target=_train, args=(run,))
                with _visible(gpu):
                    process.start()
                running[process.sentinel] = (process, run, gpu)
            for sentinel in wait(list(running)):
                process, run, gpu = running.pop(sentinel)
                process.join()
                places.append(gpu)
                if process.exitcode == DIVERGED:
                    diverged.add(run.output)
                elif process.exitcode != 0:
                    failed.append(f"{run.output} (exit code {process.exitcode})")
    finally:
        for process, _, _ in running.values():
            process.terminate()
        for process, _, _ in running.values():
            process.join(STOP_SECONDS)
            if process.is_alive():
                process.kill()
    if failed:
        raise WorkerError(f"{len(failed)} of {len(runs)} trainings failed: {', '.join(failed)}")
    return diverged


def language_result(run: LanguageRun) -> LanguageResult:
    """The result of a run that has ended."""
    return load_result(LanguageFolder(Path(run.output)).result)


def gradient_norms(run: LanguageRun) -> list[float]:
    """The gradient's norm before it is scaled down, at every logged step where it was finite."""
    points = read_log(LanguageFolder(Path(run.output)).log)
    return [point["gradient_norm"] for point in points if point.get("gradient_norm") is not None]


def _train(run: LanguageRun) -> None:
    """The life of a process: one training, to its end or to a signal."""
    torch.set_num_threads(1)
    with StopSignals() as signals:
        try:
            train_language(run, signals=signals)
        except NonFiniteLoss as error:
            print(f"{run.output}: {error}", file=sys.stderr)
            sys.exit(DIVERGED)
        except Stopped as stopped:
            sys.exit(stopped.exit_code)
        except KeyboardInterrupt:
            sys.exit(130)


def _gpus(device: torch.device) -> list[str | None]:
    """The GPUs that "cuda" stands for, as CUDA_VISIBLE_DEVICES names them; None on the CPU."""
    if device.type != "cuda":
        return [None]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]
    return [*names] if device.index is None else [names[device.index]]


@contextmanager
def _visible(gpu: str | None) -> Iterator[None]:
    """Within the block a process that starts sees this GPU alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
