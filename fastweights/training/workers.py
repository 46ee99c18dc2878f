"""Worker processes that train runs in parallel, and the parent's side of the messages between them.

Each worker has its own pipe: a killed worker can then hold no lock that others wait for, and closing the
pipe at either end notifies the other. A worker whose pipe is closed, by a parent that stops or dies, saves its run and ends.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..layers import import_mixers
from ..results.recall import RecallResult, save_result
from .experiment import RecallRun
from .folder import ExperimentFolder
from .progress import Reporter
from .train import train_run

__all__ = ["WorkerError", "train_runs"]

_REPORT_SECONDS = 0.2
_STOP_SECONDS = 30.0  # a worker may still be importing torch


class WorkerError(RuntimeError):
    """A worker died or failed. `details` is the worker's traceback, if it could send one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class _Step:
    step: int
    loss: float | None
    speed: float


@dataclass(frozen=True)
class _Failure:
    error: str
    details: str


def train_runs(
    runs: Sequence[RecallRun],
    folder: ExperimentFolder,
    *,
    workers: int,
    checkpoint_seconds: float,
    reporter: Reporter,
    log_every: int,
    imports: Sequence[str] = (),
) -> None:
    """Train `runs` in their order, on `workers` processes; each result is written to `folder` by its worker. The workers first
    import the modules `imports`, which register mixers.

    Raises:
        WorkerError: a worker died or failed. The others have saved their runs.
    """
    waiting = list(reversed(runs))
    pool = [_Worker(index, folder, checkpoint_seconds, log_every, imports) for index in range(min(workers, len(runs)))]
    try:
        for worker in pool:
            worker.begin(waiting.pop())
        busy = {worker.connection: worker for worker in pool}
        while busy:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]  # wait() gives back what it was given
                message = worker.receive()
                if isinstance(message, _Step):
                    reporter.step(worker.index, worker.run, message.step, message.loss, message.speed)
                else:
                    reporter.end(worker.index, worker.run, message)
                    if waiting:
                        worker.begin(waiting.pop())
                    else:
                        del busy[worker.connection]
    finally:
        for worker in pool:
            worker.connection.close()
        for worker in pool:
            worker.process.join(_STOP_SECONDS)
            if worker.process.is_alive():
                worker.process.terminate()


class _Worker:
    """The parent's view of one worker process."""

    run: RecallRun  # the run that it trains

    def __init__(
        self,
        index: int,
        folder: ExperimentFolder,
        checkpoint_seconds: float,
        log_every: int,
        imports: Sequence[str],
    ) -> None:
        context = multiprocessing.get_context("spawn")  # a forked torch may hang, a forked CUDA does not work
        self.index = index
        self.connection, theirs = context.Pipe()
        arguments = (theirs, folder, checkpoint_seconds, log_every, imports)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        with _interrupts_ignored():
            self.process.start()
        theirs.close()

    def begin(self, run: RecallRun) -> None:
        self.run = run
        try:
            self.connection.send(run)
        except OSError:  # the worker is gone
            self._raise_dead()

    def receive(self) -> _Step | RecallResult:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self._raise_dead()
        if isinstance(message, _Failure):
            raise WorkerError(f"run {self.run.name} failed: {message.error}", message.details)
        return message

    def _raise_dead(self) -> None:
        self.process.join(_STOP_SECONDS)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = " (memory may have run out: use fewer workers)" if code == -signal.SIGKILL else ""
        raise WorkerError(f"the worker on run {self.run.name} {how}{hint}")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process started here ignores Ctrl-C from its first moment: stopping it is the parent's decision."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _work(
    connection: Any, folder: ExperimentFolder, checkpoint_seconds: float, log_every: int, imports: Sequence[str]
) -> None:
    """A worker's life: receive a run, train it, write its result, tell the parent; until the pipe is closed."""
    torch.set_num_threads(
        1
    )  # the numbers must not depend on the number of workers; small models gain nothing from more threads
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        while True:
            run = connection.recv()
            try:
                import_mixers(imports)
                result = _train(run, connection, folder, checkpoint_seconds, log_every)
            except Exception as error:
                connection.send(_Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
                return
            if result is None:
                return
            connection.send(result)
    except (EOFError, OSError):  # the parent stopped or died
        return


def _train(
    run: RecallRun, connection: Connection, folder: ExperimentFolder, checkpoint_seconds: float, log_every: int
) -> RecallResult | None:
    last_time, last_step = time.monotonic(), None

    def report(step: int, loss: float | None) -> None:
        nonlocal last_time, last_step
        now = time.monotonic()
        if last_step is None:
            last_time, last_step = now, step
        elif now - last_time >= _REPORT_SECONDS or step % log_every == 0:
            with suppress(BrokenPipeError):  # the parent is gone: the next look at `should_stop` tells
                connection.send(_Step(step, loss, (step - last_step) / max(now - last_time, 1e-9)))
            last_time, last_step = now, step

    result = train_run(
        run,
        folder.checkpoint(run),
        checkpoint_seconds=checkpoint_seconds,
        on_step=report,
        should_stop=connection.poll,
    )
    if result is not None:
        save_result(folder.result(run), result)
        folder.checkpoint(run).unlink(missing_ok=True)
    return result
