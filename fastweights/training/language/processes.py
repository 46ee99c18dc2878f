"""The processes of one training, as torchrun and accelerate launch start them: how many there are, whether that is as many as it
should be, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed
from accelerate.utils import broadcast_object_list

from .run import LanguageRun

__all__ = [
    "check_launch",
    "from_main_process",
    "is_main_process",
    "largest_of_processes",
    "on_main_process",
    "process_index",
    "step_size",
    "world_size",
]

START = "start several with torchrun --nproc-per-node N -m fastweights train ..."


def world_size() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_index() -> int:
    """The number of this process, from 0 on."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this process is the one that writes files."""
    return process_index() == 0


def from_main_process(value: Any) -> Any:
    """The main process's `value`, in every process."""
    return broadcast_object_list([value])[0]


def on_main_process(work: Callable[[], Any]) -> Any:
    """What `work` returns in the main process, which alone does it, in every process. So is a ValueError that it raises."""
    value = refusal = None
    if is_main_process():
        try:
            value = work()
        except ValueError as error:
            refusal = str(error)
    value, refusal = from_main_process((value, refusal))
    if refusal is not None:
        raise ValueError(refusal)
    return value


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
    return None if torch.distributed.get_backend() == "gloo" else torch.distributed.new_group(backend="gloo")


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """ValueError where a launcher was to start several processes, but this one would train by itself.

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


def step_size(run: LanguageRun, processes: int | None = None) -> str:
    """What a step reads, in words and numbers."""
    processes = world_size() if processes is None else processes
    tokens = processes * run.batch_size * run.accumulation * run.length
    counts = (
        _count(processes, "process", "processes"),
        _count(run.batch_size, "row", "rows"),
        _count(run.accumulation, "pass", "passes"),
        _count(run.length, "token", "tokens"),
    )
    ramp = f", after {_count(len(run.batch_ramp), 'stage', 'stages')} of other sizes" if run.batch_ramp else ""
    return f"{' x '.join(counts)} = {tokens:,} tokens per step{ramp}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
