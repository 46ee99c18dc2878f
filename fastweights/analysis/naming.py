"""What tables and plots call the parts of a task."""

from __future__ import annotations

from collections.abc import Sequence

from ..data import TASKS, Task
from ..results import RecallResult

__all__ = ["short_unit", "find_task"]


def find_task(results: Sequence[RecallResult]) -> type[Task]:
    """The class of the results' task; the base class for a task that is no longer there."""
    return TASKS.get(results[0].run["task"], Task)


def short_unit(results: Sequence[RecallResult]) -> str:
    """What the difficulty of the task counts, in one word: "pairs", "tokens"."""
    return find_task(results).unit.split()[-1]
