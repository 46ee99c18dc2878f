"""What a part of the leaderboard would train, without training it."""

from __future__ import annotations

from typing import Any

from .parts import Part
from .record import board_path
from .request import Request
from .run import RULES_SIZE, find_rules
from .sizes import SIZES
from .terminal import cost_of

__all__ = ["plan_part"]


def plan_part(part: Part, request: Request) -> dict[str, Any]:
    """The mixers of a request in a part, the trainings of a mixer at most, and the file of the results. Nothing is written.

    Raises:
        ValueError: mixers that the part cannot measure.
    """
    size = RULES_SIZE if part.kind == "rules" else request.size
    mixers = [choice.label for choice in request.mixers]
    return {
        "part": part.name,
        "measures": part.says,
        "size": size,
        "mixers": list(find_rules(mixers)) if part.kind == "rules" else mixers,
        "trainings per mixer, at most": _trainings(part, request),
        "cost with every mixer": cost_of(part, request.size),
        "output": "none" if part.kind == "read" else str(board_path(request.output, part.name, size)),
    }


def _trainings(part: Part, request: Request) -> int:
    """The first seed takes every learning rate, each other one the best of these."""
    if part.kind not in ("task", "language"):
        return 0
    size = SIZES[request.size]
    declared = size.tasks[part.name] if part.kind == "task" else size.language
    columns = len(size.tasks[part.name].columns) if part.kind == "task" else 1
    return columns * (len(declared.rates) + len(request.seeds or declared.seeds) - 1)
