"""Trains language models at the same time, each in a process of its own: one of them alone leaves most of a GPU idle."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from ...environment import OutOfMemory, within_memory
from ...layers import import_mixers
from ...stopping import Stopped, StopSignals, join_or_kill
from ..calling_script import prepared, starting_processes, work_begins
from ..workers import WorkerError
from .folder import LanguageFolder
from .run import LanguageRun
from .train import NonFiniteLoss, train_language

__all__ = ["train_here", "train_together"]

STOP_SECONDS = 120.0  # a step and a checkpoint


def report_divergence(run: LanguageRun, why: str | None) -> None:
    """A line to stderr where a training has diverged."""
    if why is not None:
        print(f"{run.output}: {why}", file=sys.stderr)


def train_together(
    runs: Sequence[LanguageRun],
    workers: int,
    device: str,
    imports: Sequence[str] = (),
    ended: Callable[[LanguageRun, str | None], None] = report_divergence,
) -> set[str]:
    """Train every run that has no result, `workers` at a time. The same call continues after an interruption.

    Args:
        workers: processes.
        device: "cuda" stands for all GPUs, over which the runs are spread; "cuda:1" for that one.
        imports: modules that register mixers, for the processes.
        ended: called with a run whose process has ended without a failure, and why its loss was no longer finite, or None.

    Returns:
        The output folders of trainings whose loss became infinite or NaN.

    Raises:
        WorkerError: other trainings have failed. All that did not have been trained.
        KeyboardInterrupt: Ctrl-C, or a signal where the caller has entered `StopSignals`. The trainings have saved checkpoints.
    """
    work_begins("train_together")
    context = multiprocessing.get_context("spawn")  # a forked CUDA does not work
    waiting = [run for run in runs if not LanguageFolder(Path(run.output)).result.exists()]
    gpus = _gpus(torch.device(device))
    places = [gpus[index % len(gpus)] for index in range(workers)]
    train = prepared(_train)
    running: dict[Any, tuple[Any, LanguageRun, Any, str | None]] = {}
    diverged, failed = set(), []
    try:
        while waiting or running:
            while waiting and places:
                run, gpu = waiting.pop(0), places.pop(0)
                with starting_processes(), _visible(gpu):
                    divergence = context.SimpleQueue()  # starts a process too, which tracks what queues leave behind
                    process = context.Process(target=train, args=(run, imports, divergence))
                    process.start()
                running[process.sentinel] = (process, run, divergence, gpu)
            for sentinel in wait(list(running)):
                process, run, divergence, gpu = running.pop(sentinel)
                process.join()
                places.append(gpu)
                if process.exitcode != 0:
                    failed.append(f"{run.output} (exit code {process.exitcode})")
                    continue
                why = None if divergence.empty() else divergence.get()
                if why is not None:
                    diverged.add(run.output)
                ended(run, why)
    finally:
        for process, *_ in running.values():
            process.terminate()
        join_or_kill((process for process, *_ in running.values()), STOP_SECONDS)
    if failed:
        raise WorkerError(f"{len(failed)} of {len(runs)} trainings failed: {', '.join(failed)}")
    return diverged


def train_here(run: LanguageRun) -> str | None:
    """Train in this process. Returns why the loss was no longer finite, or None."""
    disable_progress_bar()  # one per saved file
    with StopSignals() as signals:
        try:
            train_language(run, signals=signals)
        except NonFiniteLoss as error:
            return str(error)
    return None


def _train(run: LanguageRun, imports: Sequence[str], divergence: Any) -> None:
    """The life of a process: one training, to its end or to a signal."""
    torch.set_num_threads(1)
    import_mixers(imports)
    try:
        with within_memory("a smaller batch_size, or fewer workers,"):
            why = train_here(run)
    except OutOfMemory as error:
        print(f"{run.output}: {error}", file=sys.stderr)
        sys.exit(1)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    if why is not None:
        divergence.put(why)


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
