"""The leaderboard's tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fastweights.analysis.table_style import add_row, plain_table
from fastweights.layers import MIXERS

from ..record import Row
from .part import Part

__all__ = ["describe_origins", "make_table", "parts_table"]


def parts_table(parts: Sequence[Part], size: str, output: Path, measurements: Path) -> Table:
    """Every part: what it measures, what it costs, how many mixers have results."""
    table = plain_table(
        "Leaderboard",
        f"`fastweights leaderboard PART` runs one. Cost: of every mixer at the size {size}, an estimate. Found: mixers with "
        "results, in the output folder, among those that the library comes with, or among the measurements.",
        text=("part", "found", "cost", "what it measures"),
    )
    for part in parts:
        rows = part.rows(size, output, measurements)
        found = {entry.label for entry in part.entries([*part.library(size, rows), *rows])}
        add_row(table, part.name, f"{len(found)} of {len(part.listed(tuple(MIXERS)))}", part.cost(size), part.says)
    return table


def make_table(part: Part, head: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """The table of `table_of` for a terminal."""
    table = plain_table(f"{part.name}: {part.says}", part.explanation(), text=head[:1], numbers=head[1:])
    for line in lines:
        add_row(table, *line)
    return table


def describe_origins(part: Part, library: Sequence[Row], output: Path) -> str:
    """Which lines of a table are the library's own results, and where these were measured; "" where none is."""
    if not library:
        return ""
    machines = sorted({row.origin.device for row in library})
    number = len({entry.label for entry in part.entries(library)})
    lines = f"The results of {number} mixers come" if number > 1 else "The results of one mixer come"
    return f"{lines} with the library, measured on {' and '.join(machines)}; only the others are in {output}.\n"
