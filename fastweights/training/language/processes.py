"""The processes of one training, as torchrun, srun and accelerate launch start them: how many there are, whether that is as many
as it should be, and what they tell each other.

They talk through torch's store, on whose server they find each other. It needs no process group, and a process that waits in it
answers signals.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore, Store

from ...environment import process_index, world_size
from ...ops.context_parallel import agreement
from .run import LanguageRun

__all__ = [
    "JOIN_SECONDS",
    "check_launch",
    "from_main_process",
    "gather_to_main",
    "is_main_process",
    "largest_of_processes",
    "name_ranks",
    "new_cpu_group",
    "node",
    "note_hosts",
    "on_every_process",
    "on_main_process",
    "process_index",
    "step_size",
    "world_size",
]

START = "start several with torchrun --nproc-per-node N -m fastweights train ..."
JOIN_SECONDS = 600.0  # from the first process to the last: torchrun too waits as long for its hosts
POLL_SECONDS = 0.2

_numbers = itertools.count()  # of the values exchanged: every process exchanges the same ones
_hosts: list[str] = []  # by rank


def is_main_process() -> bool:
    """Whether this process is the one that writes files."""
    return process_index() == 0


def node() -> str:
    """A name that the processes of one launcher share: the host, and which launcher of torchrun or srun it is."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', os.environ.get('SLURM_NODEID', ''))}"


def note_hosts(hosts: Sequence[str]) -> None:
    """Keep the host of every rank, for messages."""
    _hosts[:] = hosts


def name_ranks(*ranks: int) -> str:
    """The ranks and their hosts, for messages: "ranks 2, 3 (node-b)"."""
    return agreement.name_ranks(ranks, _hosts)


@cache
def _store() -> Store:
    """The store of all processes. In the main process it is the server, unless torchrun has one.

    Raises:
        ValueError: the environment does not say where the server is, or the processes have not all come to it in `JOIN_SECONDS`.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is {world_size()}, but {' and '.join(missing)} are not set, so that the processes cannot find each "
            "other; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port on it, the same in all of them"
        )
    try:
        store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
    except torch.distributed.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(
            f"{world_size()} processes must meet at {place} (MASTER_ADDR, MASTER_PORT) within {JOIN_SECONDS:.0f} seconds, but "
            f"they have not ({error}); start as many as WORLD_SIZE says, and let their hosts reach that port"
        ) from None
    return PrefixStore("fastweights", store)


def from_main_process(value: Any) -> Any:
    """The main process's `value`, in every process."""
    if world_size() == 1:
        return value
    key = f"{next(_numbers)}"
    if is_main_process():
        _write(key, value)
        return value
    return _read(key)


def gather_to_main(value: Any, seconds: float = float("inf")) -> list[Any]:
    """In the main process the `value` of every process, by rank; in another its own alone.

    Raises:
        ValueError: a process has not come in `seconds`.
    """
    if world_size() == 1:
        return [value]
    number = next(_numbers)
    _write(f"{number}/{process_index()}", value)
    if not is_main_process():
        return [value]
    until = time.monotonic() + seconds
    return [_read(f"{number}/{rank}", until, rank) for rank in range(world_size())]


def _write(key: str, value: Any) -> None:
    _store().set(key, pickle.dumps(value))  # type: ignore[arg-type]  # torch's annotation leaves bytes out


def _read(key: str, until: float = float("inf"), rank: int = 0) -> Any:
    """What `rank` sets at a key of the store, once it has. torch's own wait would hold up signals."""
    store, pause = _store(), POLL_SECONDS / 200
    while not store.check([key]):
        if time.monotonic() > until:
            raise ValueError(f"{name_ranks(rank)} of {world_size()} has not come within {JOIN_SECONDS:.0f} seconds")
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)
    return pickle.loads(store.get(key))


def on_main_process(work: Callable[[], Any]) -> Any:
    """What `work` returns in the main process, which alone does it, in every process. So is a ValueError that it raises."""
    value, refusal = _try(work) if is_main_process() else (None, None)
    value, refusal = from_main_process((value, refusal))
    if refusal is not None:
        raise ValueError(refusal)
    return value


def on_every_process(work: Callable[[], Any]) -> Any:
    """What `work` returns in this process. It must not talk to the others.

    Raises:
        ValueError: that of `work` in the first process where it raised one, which is raised in all of them.
    """
    if world_size() == 1:
        return work()
    value, refusal = _try(work)
    refusals = gather_to_main(refusal)
    first = from_main_process(next(((rank, why) for rank, why in enumerate(refusals) if why is not None), None))
    if first is not None:
        rank, why = first
        raise ValueError(f"{name_ranks(rank)}: {why}" if rank else why)
    return value


def _try(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `work` returns, or the message of its ValueError."""
    try:
        return work(), None
    except ValueError as error:
        return None, str(error)


def largest_of_processes(number: int) -> int:
    """The largest `number` of all processes. They agree between their processors: no GPU waits for it."""
    if world_size() == 1:
        return int(number)
    found = torch.tensor(int(number))
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=_between_processors())
    return int(found)


@cache
def _between_processors() -> Any:
    """A group of all processes for tensors on the CPU. The first call is made by all of them."""
    return None if torch.distributed.get_backend() == "gloo" else new_cpu_group()


def new_cpu_group() -> Any:
    """A new group of all processes that exchanges between their processors, so that no GPU waits; None for a process alone. Every
    process calls it."""
    return torch.distributed.new_group(backend="gloo") if torch.distributed.is_initialized() else None


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """ValueError where a launcher was to start several processes, but this one would train by itself, or starts it again.

    torchrun sets WORLD_SIZE, RANK and LOCAL_RANK. accelerate launch does so for several GPUs; for one GPU or none it starts a
    single process, whatever --num_processes says, and of several it sets the address alone.
    """
    processes = environment.get("WORLD_SIZE")
    if processes is None:
        if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
            raise ValueError(
                "accelerate launch was given --num_processes above 1, but started this process alone, as it does without several "
                f"GPUs; {START}, or pass --num_processes 1"
            )
        return
    missing = [name for name in ("RANK", "LOCAL_RANK") if name not in environment]
    if int(processes) > 1 and missing:
        raise ValueError(
            f"WORLD_SIZE is {processes}, but {' and '.join(missing)} are not set, so that this process would train alone; "
            f"{START}, or unset WORLD_SIZE to train in one"
        )
    if int(processes) > 1 and environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise ValueError(
            "torchrun must be started with --max-restarts 0: processes that it starts again find in its store what earlier ones "
            "told each other; give the command itself again, which continues after the last checkpoint"
        )


def step_size(run: LanguageRun, processes: int | None = None) -> str:
    """What a step reads, in words and numbers."""
    processes = world_size() if processes is None else processes
    groups = run.context_groups(processes)
    tokens = groups * run.batch_size * run.accumulation * run.length
    who = _count(processes, "process", "processes")
    counts = (
        who if run.context_parallel == 1 else f"{who} in {_count(groups, 'context group', 'context groups')}",
        _count(run.batch_size, "row", "rows"),
        _count(run.accumulation, "pass", "passes"),
        _count(run.length, "token", "tokens"),
    )
    ramp = f", after {_count(len(run.batch_ramp), 'stage', 'stages')} of other sizes" if run.batch_ramp else ""
    return f"{' x '.join(counts)} = {tokens:,} tokens per step{ramp}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
