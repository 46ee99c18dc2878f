"""Runs a part, or reads it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastweights.checks import check_choice
from fastweights.kinds import checked
from fastweights.outputs import claim_files
from fastweights.training.calling_script import work_begins

from ..places import RESULTS
from ..record import Row
from .board import is_board
from .part import Part
from .prediction import predict_minutes, read_steps
from .request import Request
from .sizes import SIZES
from .tables import Cell, part_cells, part_table

__all__ = ["claim_boards", "part_rows", "plan_part", "cells_of", "run_part", "table_of"]


@checked
def run_part(part: Part, request: Request) -> Path | None:
    """Measure a part for the mixers of a request. Returns the file of its board; None where scripts measure the part."""
    work_begins("run_part")
    return part.run(request)


def claim_boards(name: str, parts: Sequence[Part], request: Request) -> AbstractContextManager[None]:
    """Hold the boards of these parts in the output folder, the argument `name`, as `claimed` does."""
    files = [file for part in parts for file in part.files(request)]
    return claim_files(name, dict.fromkeys(files, is_board), "result", overwrite=False)


@checked
def part_rows(part: Part, size: str, folder: Path, measurements: Path) -> list[Row]:
    """The rows that a part has at a size: those of its board in `folder`, or of the files that scripts have written to
    `measurements`."""
    check_choice("size", size, SIZES)
    return part.rows(size, folder, measurements)


@checked
def table_of(part: Part, size: str, rows: Sequence[Row], mixers: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of a part, with a line for each of `mixers`."""
    return part_table(part, part.entries(rows), part.listed(mixers))


def cells_of(part: Part, size: str, rows: Sequence[Row]) -> dict[str, dict[str, Cell]]:
    """The cells of that table by column and line, the best first."""
    return part_cells(part, part.entries(rows))


def plan_part(part: Part, request: Request) -> dict[str, Any]:
    """The mixers of a request in a part, the trainings of a mixer at most, and the file of the results. Nothing is written.

    Raises:
        ValueError: mixers that the part cannot measure.
    """
    files, steps = part.files(request), part.planned_steps(request)
    return {
        "part": part.name,
        "measures": part.says,
        "size": part.board_size(request.size),
        "mixers": part.participants(request.mixers),
        "trainings per mixer, at most": part.trainings(request),
        **({"steps, at most": sum(steps.values())} if steps else {}),
        **(
            predict_minutes(steps, read_steps(RESULTS), request.processes()) if steps and request.size == "full" else {}
        ),
        "cost with every mixer": part.cost(request.size),
        "output": str(files[0]) if files else "none",
    }
