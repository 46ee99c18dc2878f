"""What looks at the model of a recall run while it is trained: functions of other packages, by entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ...data import RecallTask

__all__ = ["GROUP", "find_watches", "watch_model"]

GROUP = "fastweights.watches"


@cache
def find_watches() -> tuple[Any, ...]:
    """The functions (model, task, *, seed, device) -> numbers by name.

    Raises:
        ValueError: none is installed.
    """
    found = tuple(point.load() for point in entry_points(group=GROUP))
    if not found:
        raise ValueError(
            f"watch_every needs a package with an entry point of the group {GROUP}; "
            "install one, or leave watch_every out"
        )
    return found


def watch_model(model: Any, task: RecallTask, *, seed: int, device: str) -> dict[str, float]:
    """What all watches found."""
    found: dict[str, float] = {}
    for watch in find_watches():
        found |= watch(model, task, seed=seed, device=device)
    return found
