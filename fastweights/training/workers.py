"""Worker processes that train runs in parallel, and the parent's side of the messages between them.

Each worker has its own pipe: a killed worker can then hold no lock that others wait for, and closing the
pipe at either end notifies the other. A worker whose pipe is closed, by a parent that stops or dies, saves its run and ends.
Signals that stop a command often reach all its processes. Workers hold them back for ever: the parent decides.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..environment import OutOfMemory, usable_cores, within_memory
from ..files import WriteError
from ..layers import import_mixers
from ..results.recall import RecallResult, save_result
from ..safe_path import HAS_SAFE_PATH
from ..stopping import SIGNALS, join_or_kill
from .calling_script import prepared, starting_processes
from .experiment import RecallRun
from .folder import ExperimentFolder
from .progress import Reporter
from .train import train_run

__all__ = ["Job", "WorkerError", "gpus_of_workers", "signals_held_back", "train_runs", "usual_workers"]

LESS_MEMORY = "a smaller batch_size, or fewer workers,"
PER_GPU = 8  # small models that train on one GPU at the same time: one alone leaves most of it idle

_REPORT_SECONDS = 0.2
_STOP_SECONDS = 30.0  # a worker may still be importing torch


class WorkerError(RuntimeError):
    """A worker died or failed. `details` is the worker's traceback, if it could send one. ends_all: whether other runs would
    fail likewise."""

    def __init__(self, message: str, details: str = "", ends_all: bool = False) -> None:
        super().__init__(message)
        self.details, self.ends_all = details, ends_all


@dataclass(frozen=True)
class _Step:
    step: int
    loss: float | None
    speed: float


@dataclass(frozen=True)
class _Failure:
    error: str
    details: str
    ends_all: bool = False


@dataclass(frozen=True)
class Job:
    """A run, and the folder of its experiment. part: the experiment's name where there are several."""

    run: RecallRun
    folder: ExperimentFolder
    part: str = ""

    @property
    def name(self) -> str:
        """What messages call the run."""
        return f"{self.part}/{self.run.name}" if self.part else self.run.name


@dataclass(frozen=True)
class _Orders:
    """What a worker does with every run. environment: this process's variables. gpu: the one that "cuda" means to the worker."""

    checkpoint_seconds: float
    log_every: int
    imports: Sequence[str]
    environment: Mapping[str, str]
    gpu: int | None = None


def train_runs(
    jobs: Sequence[Job],
    *,
    workers: int,
    checkpoint_seconds: float,
    reporter: Reporter,
    log_every: int,
    imports: Sequence[str] = (),
) -> None:
    """Train the runs of `jobs` in their order, on `workers` processes; a worker writes the results of its runs. The workers first
    import the modules `imports`, which register mixers. Those of runs on "cuda" are spread over the GPUs of the machine.

    A run that fails, or whose worker dies, is lost alone: a new worker trains the next run.

    Raises:
        WorkerError: at the end, if runs failed; at once where no file can be written. The others have saved their runs.
    """
    waiting = list(reversed(jobs))
    devices = {job.run.device for job in jobs}
    orders, context = _Orders(checkpoint_seconds, log_every, imports, dict(os.environ)), _context(devices)
    gpus = gpus_of_workers(devices, min(workers, len(jobs)))
    free = [_Worker(index, replace(orders, gpu=gpu), context) for index, gpu in enumerate(gpus)]
    busy: dict[Any, _Worker] = {}
    failures: list[WorkerError] = []
    try:
        while busy or waiting:
            while free and waiting:
                worker = free.pop(0)
                busy[worker.connection] = worker
                worker.begin(waiting.pop())
            for connection in wait(list(busy)):
                worker, message = busy[connection], busy[connection].receive()
                if isinstance(message, _Step):
                    reporter.step(worker.index, worker.job.run, message.step, message.loss, message.speed)
                    continue
                free.append(busy.pop(connection))
                if not isinstance(message, WorkerError):
                    reporter.end(worker.index, worker.job.run, message)
                    continue
                if message.ends_all:
                    raise message
                reporter.note(str(message))
                failures.append(message)
                free[-1] = worker.successor()
                _end([worker])
    finally:
        _end([*free, *busy.values()])
    if failures:
        more = f" (and {len(failures) - 1} more of {len(jobs)} runs)" if len(failures) > 1 else ""
        raise WorkerError(f"{failures[0]}{more}", "".join(failure.details for failure in failures))


def gpus_of_workers(devices: Collection[str], workers: int) -> list[int | None]:
    """The GPU of each worker: where "cuda" is among the devices of the runs all those that the machine has, one after the other;
    else None, which leaves the devices as they are."""
    if "cuda" not in devices:
        return [None] * workers
    return [index % torch.cuda.device_count() for index in range(workers)]


def usual_workers(device: str, per_gpu: int = PER_GPU) -> int:
    """How many processes train where nobody says how many: one per core, or so many on each GPU that the device stands for."""
    place = torch.device(device)
    if place.type == "cpu":
        return usable_cores()
    return per_gpu * (1 if place.index is not None else torch.cuda.device_count())


def _context(devices: Collection[str]) -> Any:
    """How processes start. For runs on the CPU they are forks of a server that has imported torch and computes nothing: a torch
    that has computed may hang in a fork. CUDA does not work in one."""
    if sys.platform != "linux" or any(torch.device(device).type != "cpu" for device in devices):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    if HAS_SAFE_PATH:  # else the server has another path than this process, and might find another fastweights there
        context.set_forkserver_preload(["fastweights.training.recall"])
    return context


class _Worker:
    """The parent's view of one worker process."""

    job: Job  # what it trains

    def __init__(self, index: int, orders: _Orders, context: Any) -> None:
        self.index = index
        self.connection, self._theirs = context.Pipe()
        self._orders, self._context = orders, context
        self.process = context.Process(target=prepared(_work), args=(self._theirs, orders), daemon=True)

    def successor(self) -> "_Worker":
        """A worker in the place of this one, not started."""
        return _Worker(self.index, self._orders, self._context)

    def begin(self, job: Job) -> None:
        """Train `job`. The first one starts the process."""
        self.job = job
        if self.process.pid is None:
            with starting_processes(), signals_held_back():
                self.process.start()
            self._theirs.close()
        with suppress(OSError):  # the worker is gone: `receive` says so
            self.connection.send(job)

    def receive(self) -> _Step | RecallResult | WorkerError:
        """The next message; an error where the run is lost, and the worker with it."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return self._death()
        if isinstance(message, _Failure):
            return WorkerError(f"run {self.job.name} failed: {message.error}", message.details, message.ends_all)
        return message

    def _death(self) -> WorkerError:
        self.process.join(_STOP_SECONDS)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = " (memory may have run out: use fewer workers)" if code == -signal.SIGKILL else ""
        return WorkerError(f"the worker on run {self.job.name} {how}{hint}")


def _end(workers: Sequence[_Worker]) -> None:
    """Close the pipes, and wait until the processes have saved their runs."""
    for worker in workers:
        worker.connection.close()
    join_or_kill((worker.process for worker in workers if worker.process.pid is not None), _STOP_SECONDS)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process started here inherits that these signals are blocked, and so does a server with all its forks; for this process
    they are late by that time."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows has neither
        yield
        return
    resource_tracker.ensure_running()  # where it starts it, Python unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *SIGNALS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Any, orders: _Orders) -> None:
    """A worker's life: receive a run, train it, write its result, tell the parent; until the pipe is closed."""
    os.environ.update(orders.environment)  # a server has those of the time when it was started
    # The numbers must not depend on the number of workers; small models gain nothing from more threads.
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    if orders.gpu is not None:
        torch.cuda.set_device(orders.gpu)
    try:
        while True:
            job = connection.recv()
            try:
                with within_memory(LESS_MEMORY):
                    import_mixers(orders.imports)
                    result = _train(job, connection, orders)
            except WriteError as error:  # a full disk needs no traceback
                connection.send(_Failure(str(error), "", ends_all=True))
                return
            except OutOfMemory as error:
                connection.send(_Failure(str(error), ""))
                return
            except Exception as error:
                connection.send(_Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
                return
            if result is None:
                return
            connection.send(result)
    except (EOFError, OSError):  # the parent stopped or died
        return


def _train(job: Job, connection: Connection, orders: _Orders) -> RecallResult | None:
    run, checkpoint = job.run, job.folder.checkpoint(job.run)
    last_time, last_step = time.monotonic(), None

    def report(step: int, loss: float | None) -> None:
        nonlocal last_time, last_step
        now = time.monotonic()
        if last_step is None:
            last_time, last_step = now, step
        elif now - last_time >= _REPORT_SECONDS or step % orders.log_every == 0:
            with suppress(ConnectionError):  # the parent is gone: the next look at `should_stop` tells
                connection.send(_Step(step, loss, (step - last_step) / max(now - last_time, 1e-9)))
            last_time, last_step = now, step

    result = train_run(
        run,
        checkpoint,
        checkpoint_seconds=orders.checkpoint_seconds,
        on_step=report,
        should_stop=connection.poll,
        model_folder=job.folder.model(run),
    )
    if result is not None:
        save_result(job.folder.result(run), result)
        checkpoint.unlink(missing_ok=True)
    return result
