"""Context parallelism in a training: which processes divide rows among them, and which rows each of them reads.

Of W processes with context_parallel = N, neighbours form W / N context groups: ranks 0 to N - 1, N to 2 N - 1, and so on. All
processes of a group read the same rows, and each computes its part of their tokens. Groups read different rows, as processes
do without context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import distributed

from ...distributed import context_parallel
from .processes import process_index, world_size
from .run import LanguageRun

__all__ = ["ContextGroups"]


@dataclass(frozen=True)
class ContextGroups:
    """The context groups of a training, seen from this process.

    Attributes:
        size: N, processes per group.
        count: how many groups there are.
        index: the number of the group that this process is in.
        leads: whether this process is the first of its group.
        way: how memories work on rows that are divided.
    """

    size: int
    count: int
    index: int
    leads: bool
    way: str

    @classmethod
    def of(cls, run: LanguageRun) -> ContextGroups:
        """Those of a run in the processes that there are.

        Raises:
            ValueError: context_parallel does not divide their number.
        """
        size = run.context_parallel
        return cls(
            size,
            run.context_groups(world_size()),
            process_index() // size,
            process_index() % size == 0,
            run.context_way,
        )

    @property
    def name(self) -> str:
        """What messages call the groups."""
        return "processes" if self.size == 1 else "context groups"

    def make(self) -> Any:
        """The process group of this process's context group, which all processes make together; None where each is alone."""
        return None if self.size == 1 else _own_group(distributed.group.WORLD, self.size)

    def divide(self, model: Any) -> None:
        """From now on all processes of a group call the model together."""
        if self.size > 1:
            context_parallel(model, self.make(), self.way)  # type: ignore[arg-type]  # checked by the run


@cache
def _own_group(world: Any, size: int) -> Any:
    """Made once for all models: every group of NCCL keeps memory of the GPU."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = distributed.init_device_mesh(kind, (world.size() // size, size), mesh_dim_names=("data", "context"))
    return mesh["context"].get_group()
