"""The one pool of processes: trainings and measurements run in it, several at a time, with the GPUs shared out among them.

Each worker has its own pipe: a killed worker can then hold no lock that others wait for, and closing the
pipe at either end notifies the other. A worker whose pipe is closed, by a parent that stops or dies, saves its task and ends.
Signals that stop a command often reach all its processes. Workers hold them back for ever: the parent decides.
"""

from __future__ import annotations

import _thread
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

import torch

from ..environment import OutOfMemory, usable_cores, within_memory
from ..files import WriteError
from ..layers import import_mixers
from ..safe_path import HAS_SAFE_PATH
from ..stopping import SIGNALS, Stopped, join_or_kill
from .calling_script import prepared, starting_processes

__all__ = [
    "Call",
    "Pool",
    "Task",
    "Worker",
    "WorkerError",
    "assign_gpus",
    "run_tasks",
    "signals_held_back",
    "usual_workers",
]

PER_GPU = 8  # small models that train on one GPU at the same time: one alone leaves most of it idle
STOP_SECONDS = 30.0  # a worker may still be importing torch
LOOK_SECONDS = 0.2  # between two looks for a request to stop

VISIBLE = "CUDA_VISIBLE_DEVICES"


class WorkerError(RuntimeError):
    """A worker died or failed. `details` is the worker's traceback, if it could send one. ends_all: whether other tasks would
    fail likewise."""

    def __init__(self, message: str, details: str = "", ends_all: bool = False) -> None:
        super().__init__(message)
        self.details, self.ends_all = details, ends_all


class Worker:
    """What a task sees of the process that runs it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, message: Any) -> None:
        """Send progress to the parent."""
        with suppress(OSError):  # the parent is gone: the next look at `should_stop` tells
            self._connection.send(_Report(message))

    def should_stop(self) -> bool:
        """Whether the parent stops or is gone. The task then saves its work and returns."""
        return self._connection.poll()

    @contextmanager
    def requests_as_signals(self) -> Iterator[None]:
        """In the block a request to stop arrives as SIGTERM, for a task that has entered `StopSignals`."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.is_set():
                if self._connection.poll(LOOK_SECONDS) and not ended.is_set():
                    _thread.interrupt_main(signal.SIGTERM)
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Task(Protocol):
    """A piece of work that can be pickled. name: what messages call it."""

    @property
    def name(self) -> str: ...

    def __call__(self, worker: Worker) -> Any:
        """Do the work; the result goes to the parent."""


@dataclass(frozen=True)
class Call:
    """The task of calling a function of a module, which need not know that it runs in a worker."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any] = ()

    def __call__(self, worker: Worker) -> Any:
        return self.function(*self.arguments)


@dataclass(frozen=True)
class _Report:
    message: Any


@dataclass(frozen=True)
class _Failure:
    error: str
    details: str = ""
    ends_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Pool:
    """How tasks run.

    Attributes:
        workers: processes at a time.
        devices: those that the tasks compute on. With "cuda" the workers are spread over all GPUs of the machine.
        imports: modules that register mixers, which every worker imports first.
        what: what messages call a task: "run".
        less_memory: what needs less memory, for the message where it is full.
        one_gpu: each worker sees its GPU alone, so that "cuda" means that one in libraries too; "cuda:1" among the devices stands
            for the second GPU. Otherwise a worker's GPU is torch's current one, and "cuda:1" is left to the tasks.
        renewed: every task gets a new process. It may start processes of its own.
        stop_seconds: how long tasks may save their work after a request to stop, until they are killed.
    """

    workers: int
    devices: Collection[str] = ("cpu",)
    imports: Sequence[str] = ()
    what: str = "task"
    less_memory: str = "fewer workers"
    one_gpu: bool = False
    renewed: bool = False
    stop_seconds: float = STOP_SECONDS


Kind = TypeVar("Kind", bound=Task)
Handler = Callable[[int, Kind, Any], None]


def _ignore(*arguments: Any) -> None:
    pass


def run_tasks(
    tasks: Sequence[Kind],
    pool: Pool,
    *,
    on_report: Handler[Kind] = _ignore,
    on_end: Handler[Kind] = _ignore,
    on_failure: Callable[[Kind, WorkerError], None] = _ignore,
) -> None:
    """Run `tasks` in their order, several at a time. A task that fails, or whose worker dies, is lost alone: a new worker takes
    the next one.

    Args:
        on_report: called with the number of the worker, the task and what the task has reported.
        on_end: likewise, with the result of the task.
        on_failure: called with a task that is lost, and why, as soon as it is.

    Raises:
        WorkerError: at the end, if tasks failed; at once where no file can be written. The others have saved their work.
        KeyboardInterrupt: Ctrl-C, or a signal where the caller has entered `StopSignals`. The tasks have saved their work.
    """
    waiting = list(reversed(tasks))
    gpus = _find_gpus(pool, min(pool.workers, len(tasks)))
    free = [_Process(index, pool, gpu) for index, gpu in enumerate(gpus)]
    busy: dict[Any, _Process] = {}
    failures: list[WorkerError] = []
    try:
        while busy or waiting:
            while free and waiting:
                process = free.pop(0)
                busy[process.connection] = process  # before it starts, which a signal may interrupt
                process.begin(waiting.pop())
            for connection in wait(list(busy)):
                process, message = busy[connection], busy[connection].receive()
                if isinstance(message, _Report):
                    on_report(process.index, process.task, message.message)
                    continue
                del busy[connection]
                free.append(process)
                if isinstance(message, WorkerError):
                    if message.ends_all:
                        raise message
                    on_failure(process.task, message)
                    failures.append(message)
                else:
                    on_end(process.index, process.task, message)
                if pool.renewed or isinstance(message, WorkerError):
                    free[-1] = _Process(process.index, pool, process.gpu)
                    _end([process], pool)
    finally:
        _end([*free, *busy.values()], pool)
    if failures:
        more = f" (and {len(failures) - 1} more of {len(tasks)} {pool.what}s)" if len(failures) > 1 else ""
        raise WorkerError(f"{failures[0]}{more}", "".join(failure.details for failure in failures))


def assign_gpus(devices: Collection[str], workers: int) -> list[int | None]:
    """The GPU of each worker: where "cuda" is among the devices all those that the machine has, one after the other; else None,
    which leaves the devices as they are."""
    if "cuda" not in devices:
        return [None] * workers
    return [index % torch.cuda.device_count() for index in range(workers)]


def usual_workers(device: str, per_gpu: int = PER_GPU) -> int:
    """How many processes train where nobody says how many: one per core, or so many on each GPU that the device stands for."""
    place = torch.device(device)
    if place.type == "cpu":
        return usable_cores()
    return per_gpu * (1 if place.index is not None else torch.cuda.device_count())


def _find_gpus(pool: Pool, workers: int) -> list[int | None]:
    numbered = [torch.device(device).index for device in pool.devices if ":" in device]
    if pool.one_gpu and numbered:
        return [numbered[index % len(numbered)] for index in range(workers)]
    return assign_gpus(pool.devices, workers)


def _context(devices: Collection[str]) -> Any:
    """How processes start. For tasks on the CPU they are forks of a server that has imported torch and computes nothing: a torch
    that has computed may hang in a fork. CUDA does not work in one."""
    if sys.platform != "linux" or any(torch.device(device).type != "cpu" for device in devices):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    if HAS_SAFE_PATH:  # else the server has another path than this process, and might find another fastweights there
        context.set_forkserver_preload(["fastweights.training.recall.run"])
    return context


class _Process:
    """The parent's view of a worker. gpu: the number of its GPU, None for all devices as they are."""

    task: Any

    def __init__(self, index: int, pool: Pool, gpu: int | None) -> None:
        self.index, self.gpu, self._pool = index, gpu, pool
        self._context = _context(pool.devices)
        self.connection, self._theirs = self._context.Pipe()
        self.process: Any = None

    def begin(self, task: Task) -> None:
        """Run `task`. The first one starts the process."""
        self.task = task
        if self.process is None:
            with _visible(self.gpu if self._pool.one_gpu else None):
                self._start()
        with suppress(OSError):  # the worker is gone: `receive` says so
            self.connection.send(task)

    def _start(self) -> None:
        gpu = None if self._pool.one_gpu else self.gpu
        work = prepared(partial(_work, self._pool, gpu, dict(os.environ)))
        process = self._context.Process(target=work, args=(self._theirs,), daemon=not self._pool.renewed)
        self.process = process
        with starting_processes(), signals_held_back():
            process.start()
        self._theirs.close()

    def receive(self) -> Any:
        """The next report or the result; an error where the task is lost, and the worker with it."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return self._death()
        if isinstance(message, _Failure):
            text = f"{self._pool.what} {self.task.name} failed: {message.error}"
            return WorkerError(text, message.details, message.ends_all)
        return message

    def _death(self) -> WorkerError:
        self.process.join(STOP_SECONDS)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = " (memory may have run out: use fewer workers)" if code == -signal.SIGKILL else ""
        return WorkerError(f"the worker on {self._pool.what} {self.task.name} {how}{hint}")


def _end(processes: Sequence[_Process], pool: Pool) -> None:
    """Close the pipes, and wait until the processes have saved their work."""
    for process in processes:
        process.connection.close()
    started = (one.process for one in processes if one.process is not None and one.process.pid is not None)
    join_or_kill(started, pool.stop_seconds)


@contextmanager
def _visible(gpu: int | None) -> Iterator[None]:
    """In the block a process that starts sees this GPU alone. Names and numbers that the variable has are counted from 0 on."""
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        os.environ[VISIBLE] = before.split(",")[gpu] if before else str(gpu)
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop(VISIBLE)
            if before is not None:
                os.environ[VISIBLE] = before


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process started here inherits that these signals are blocked, and so does a server with all its forks; for this process
    they are late by that time."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows has neither
        yield
        return
    resource_tracker.ensure_running()  # where it starts it, Python unblocks signals
    before = _hold_signals_back()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hold_signals_back() -> Collection[int]:
    """In this thread from now on; returns what was held back before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *SIGNALS))


def _work(pool: Pool, gpu: int | None, environment: dict[str, str], connection: Connection) -> None:
    """A worker's life: receive a task, do it, tell the parent; until the pipe is closed."""
    if hasattr(signal, "pthread_sigmask"):
        _hold_signals_back()  # a server that the caller had started before passes nothing on
    os.environ.update(environment)  # a server has those of the time when it was started
    # The numbers must not depend on the number of workers; small models gain nothing from more threads.
    torch.set_num_threads(1)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    with suppress(EOFError, OSError):
        while True:
            result = _result(connection.recv(), Worker(connection), pool)
            connection.send(result)
            if isinstance(result, _Failure):
                return


def _result(task: Task, worker: Worker, pool: Pool) -> Any:
    try:
        with within_memory(pool.less_memory):
            import_mixers(pool.imports)
            return task(worker)
    except Stopped:  # its request has closed the pipe
        return None
    except WriteError as error:  # a full disk needs no traceback
        return _Failure(str(error), ends_all=True)
    except OutOfMemory as error:
        return _Failure(str(error))
    except Exception as error:
        return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
