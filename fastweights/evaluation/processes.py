"""The processes of one evaluation, which torchrun starts to read every text together (context parallelism)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from ..checks import check_size

__all__ = ["check_processes", "context_group", "is_first_process"]


def is_first_process() -> bool:
    """Whether this process writes files and speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def check_processes(context_parallel: int) -> None:
    """ValueError unless as many processes were started as are to read a text together."""
    check_size("context_parallel", context_parallel)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != context_parallel:
        raise ValueError(
            f"context_parallel must be the number of processes, which read every text together, {started}, got "
            f"{context_parallel}; start {context_parallel} with torchrun --nproc-per-node {context_parallel} -m fastweights "
            "evaluate ..., or pass another number"
        )


@contextmanager
def context_group(context_parallel: int, device: str) -> Iterator[tuple[str, Any]]:
    """Joins the processes. Inside, the device of this one and their group, None where there is one alone.

    Raises:
        ValueError: as `check_processes`.
    """
    check_processes(context_parallel)
    if context_parallel == 1:
        yield device, None
        return
    on_gpus = torch.device(device).type == "cuda"
    if on_gpus:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    try:
        yield device, distributed.group.WORLD
        distributed.barrier()  # gloo may abort where one process still talks to another that has left
    finally:
        distributed.destroy_process_group()
