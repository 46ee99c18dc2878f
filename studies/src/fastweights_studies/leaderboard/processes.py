"""Trains language models, and measures them, in processes of their own, several on one GPU or one per core."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fastweights.environment import OutOfMemory, within_memory
from fastweights.files import write_json
from fastweights.layers import import_mixers
from fastweights.results.language import load_result
from fastweights.training.calling_script import prepared, starting_processes
from fastweights.training.workers import WorkerError, gpus_of_workers, signals_held_back

from .request import Request

__all__ = ["call_each", "has_ended", "train_models"]

RESULT, DIVERGED = "result.json", "diverged.json"
KILLED_SECONDS = 10.0  # until a killed process is gone


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


@dataclass(frozen=True)
class _Failure:
    error: str
    details: str = ""


def call_each(
    work: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], request: Request, ended: Callable[[str, Any], None]
) -> None:
    """Call `work` with the arguments of each job, in as many processes as the request has; in this process where that is one.

    A job that fails, or whose process dies, is lost alone: a new process takes the next one.

    Args:
        work: a function of a module, with arguments and results that can be pickled.
        jobs: arguments by name.
        ended: called with the name and the result of a job as soon as it is done.

    Raises:
        WorkerError: at the end, if jobs failed.
        KeyboardInterrupt: Ctrl-C, or a signal where the caller has entered `StopSignals`. Calls that run are stopped at once.
    """
    failures: dict[str, _Failure] = {}
    results = _results_here if request.processes() == 1 else _results_of_processes
    with closing(results(work, jobs, request)) as done:  # which ends the processes, also where `ended` is interrupted
        for name, result in done:
            if isinstance(result, _Failure):
                failures[name] = result
                request.reporter.note(f"{name}: failed: {result.error}")
            else:
                ended(name, result)
    if failures:
        errors = "; ".join(f"{name}: {failure.error}" for name, failure in failures.items())
        raise WorkerError(
            f"{len(failures)} of {len(jobs)} failed: {errors}", "".join(one.details for one in failures.values())
        )


def _results_here(
    work: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], request: Request
) -> Generator[tuple[str, Any]]:
    for name, arguments in jobs.items():
        yield name, _result(work, arguments, request.imports)


def _results_of_processes(
    work: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], request: Request
) -> Generator[tuple[str, Any]]:
    """The name of each job and what `work` returned, or a failure, in the order in which they are done."""
    waiting = list(jobs.items())
    gpus = gpus_of_workers([request.device], min(request.processes(), len(jobs)))
    processes = [_Process(work, request.imports, gpu) for gpu in gpus]
    free = list(processes)
    busy: dict[Any, tuple[str, _Process]] = {}
    try:
        while waiting or busy:
            while waiting and free:
                process, (name, arguments) = free.pop(), waiting.pop(0)
                busy[process.connection] = name, process
                process.begin(arguments)
            for connection in wait(list(busy)):
                name, process = busy.pop(connection)
                result = process.receive()
                if isinstance(result, _Failure):  # after an error on a GPU a process may be of no more use
                    process.kill()
                    process = _Process(work, request.imports, process.gpu)
                    processes.append(process)
                free.append(process)
                yield name, result
    finally:
        for process in processes:
            process.kill()


class _Process:
    """A process that calls `work`, one job after another. gpu: the one that "cuda" means to it."""

    def __init__(self, work: Callable[..., Any], imports: Sequence[str], gpu: int | None) -> None:
        context = multiprocessing.get_context("spawn")  # a forked CUDA does not work
        self.gpu = gpu
        self.connection, self._theirs = context.Pipe()
        self._process = context.Process(target=prepared(_serve), args=(self._theirs, work, imports, gpu), daemon=True)

    def begin(self, arguments: Sequence[Any]) -> None:
        """Give it a job. The first one starts it."""
        if self._process.pid is None:
            with starting_processes(), signals_held_back():  # Ctrl-C reaches all processes: this one decides
                self._process.start()
            self._theirs.close()
        with suppress(OSError):  # the process is gone: `receive` says so
            self.connection.send(arguments)

    def receive(self) -> Any:
        """The result of the job; a failure where the process has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join(KILLED_SECONDS)
            return _Failure(f"its process ended with exit code {self._process.exitcode}")

    def kill(self) -> None:
        """End it at once: it has nothing to save."""
        self.connection.close()
        if self._process.pid is not None:
            self._process.kill()
            self._process.join(KILLED_SECONDS)


def _serve(connection: Connection, work: Callable[..., Any], imports: Sequence[str], gpu: int | None) -> None:
    """The life of a process: calls until the parent has no more or is gone."""
    torch.set_num_threads(1)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    with suppress(EOFError, OSError):
        while True:
            connection.send(_result(work, connection.recv(), imports))


def _result(work: Callable[..., Any], arguments: Sequence[Any], imports: Sequence[str]) -> Any:
    try:
        with within_memory("fewer workers"):
            import_mixers(imports)
            return work(*arguments)
    except OutOfMemory as error:
        return _Failure(str(error))
    except Exception as error:
        return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
