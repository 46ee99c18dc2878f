"""The processes over which one sequence is divided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ContextParallel", "Way", "as_context_parallel", "group_of"]

Way = Literal["auto", "heads", "state"]
WAYS = get_args(Way)

# By name, which alone can be an argument of a node of a traced graph.
_groups: dict[str, ProcessGroup] = {}


@dataclass(frozen=True, init=False)
class ContextParallel:
    """A group of processes, each of which holds the same number of consecutive tokens of every sequence, in the order of ranks.

    Args:
        group: a `torch.distributed.ProcessGroup` that this process belongs to.
        way: how ops work on the whole sequence. "heads" gives every process some heads over all tokens. "state" leaves the
            tokens where they are and passes states on, for rules that allow it. "auto" chooses for each call.

    Attributes:
        name: of the group.
        rank: of this process in the group.
        size: number of processes.
        way: as given.

    Raises:
        TypeError: group is no process group.
        ValueError: no process group is initialised, this process is not in it, or another way.
    """

    name: str
    rank: int
    size: int
    way: Way = field(default="auto")

    def __init__(self, group: ProcessGroup, way: Way = "auto") -> None:
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "group must be a process group that is initialised, and none is; call torch.distributed.init_process_group first"
            )
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "group must have this process as a member, got a group of others; pass the group that "
                "torch.distributed.new_group returned to its members"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
        values = {"name": group.group_name, "rank": group.rank(), "size": group.size(), "way": way}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _groups[self.name] = group

    @property
    def group(self) -> ProcessGroup:
        return _groups[self.name]


def group_of(name: str) -> ProcessGroup:
    """The group that a `ContextParallel` was made of."""
    return _groups[name]


def as_context_parallel(cp_group: Any) -> ContextParallel | None:
    """What the argument `cp_group` stands for: None, a process group or a `ContextParallel`. None where nothing is divided."""
    if cp_group is None:
        return None
    cp = cp_group if isinstance(cp_group, ContextParallel) else ContextParallel(cp_group)
    return cp if cp.size > 1 else None
