"""The leaderboard's tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fastweights.analysis.table_style import add_row, plain_table
from fastweights.layers import MIXERS

from .measured import commands, cost_of_reading, mixer_of
from .parts import Part
from .record import origins
from .rules import known_rules
from .run import part_rows, rows_beside
from .sizes import SIZES
from .tables import explanation

__all__ = ["cost_of", "how_to_measure", "parts_table", "plain", "where_others_are_from"]


def parts_table(parts: Sequence[Part], size: str, output: Path, measurements: Path) -> Table:
    """Every part: what it measures, what it costs, how many mixers have results."""
    table = plain_table(
        "Leaderboard",
        f"`fastweights leaderboard PART` runs one. Cost: of every mixer at the size {size}, an estimate. Found: mixers with "
        "results, in the output folder, among those that the library comes with, or among the measurements.",
        text=("part", "found", "cost", "what it measures"),
    )
    for part in parts:
        rows = part_rows(part, size, output, measurements)
        found = {mixer_of(row["mixer"]) for row in [*rows_beside(part, size, rows), *rows]}
        every = len(known_rules()) if part.kind == "rules" else len(MIXERS)
        add_row(table, part.name, f"{len(found)} of {every}", cost_of(part, size), part.says)
    return table


def cost_of(part: Part, size: str) -> str:
    """Time with every mixer of the library, or the command that measures what is read."""
    if part.kind == "read":
        return f"read from the files of {cost_of_reading(part.name)}"
    return "2 minutes of one core" if part.kind == "rules" else SIZES[size].cost[part.name]


def plain(part: Part, head: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table of `table_of`."""
    table = plain_table(f"{part.name}: {part.says}", explanation(part), text=head[:1], numbers=head[1:])
    for line in lines:
        add_row(table, *line)
    return table


def where_others_are_from(library: Sequence[Mapping[str, Any]], output: Path) -> str:
    """Which lines of a table are the library's own results, and where these were measured; "" where none is."""
    if not library:
        return ""
    machines = sorted({origin["machine"] for row in library for origin in origins(row)})
    number = len({row["mixer"] for row in library})
    lines = f"The results of {number} mixers come" if number > 1 else "The results of one mixer come"
    return f"{lines} with the library, measured on {' and '.join(machines)}; only the others are in {output}.\n"


def how_to_measure(
    part: Part, mixers: Sequence[str], rows: Sequence[Mapping[str, Any]], imports: Sequence[str], measurements: Path
) -> str:
    """What measures those of `mixers` that the rows of a part that is read lack; "" where none is missing.

    Paths are absolute, because the benchmarks run in another folder.
    """
    found = {mixer_of(row["mixer"]) for row in rows}
    missing = [name for name in mixers if name in MIXERS and name not in found]
    if part.kind != "read" or not missing:
        return ""
    modules = [str(Path(module).resolve()) if module.endswith(".py") else module for module in imports]
    options = [word for module in modules for word in ("--import", module)]
    lines = commands(part.name, missing, [*options, "--results", str(measurements.resolve())])
    return "\n  ".join(["To measure what is missing, in a checkout of the repository and on a GPU:", *lines]) + "\n"
