"""Runs a part, or reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastweights.checks import check_choice
from fastweights.files import file_name
from fastweights.kinds import checked
from fastweights.layers import MIXERS
from fastweights.outputs import claim_files
from fastweights.results import ResultsError
from fastweights.training.calling_script import work_begins
from fastweights.training.folder import remove_trainings
from fastweights.training.output_folder import as_stored

from .language import needle_setting, run_language, run_needle
from .measured import read_rows
from .parts import Part
from .record import board_path, is_board, library_rows, load_board
from .request import Request
from .rules import LEFT_OUT, SAME_RULE, known_rules
from .sizes import SIZES
from .tables import part_table
from .trainings import run_tasks
from .untrained import declaration, measure_untrained

__all__ = [
    "RULES_SIZE",
    "claimed_boards",
    "find_rules",
    "forget",
    "part_rows",
    "resolution_of",
    "rows_beside",
    "run_part",
    "table_of",
]

RULES_SIZE = "cpu"  # the rules without training have one size
NOT_DECLARED = "has no declared rule (fastweights_studies.leaderboard.register_rule declares one)"


@checked
def run_part(part: Part, request: Request) -> Path | None:
    """Measure a part for the mixers of a request; the file of its board, None where its numbers are read."""
    work_begins("run_part")
    size = SIZES[request.size]
    if part.kind == "read":
        return None
    if part.kind == "rules":
        rules = find_rules([choice.name for choice in request.mixers])
        return measure_untrained(request.output, rules, request.reporter.note).path
    if part.kind == "task":
        return run_tasks(part.name, size.tasks[part.name], request).path
    return (run_language if part.kind == "language" else run_needle)(size.language, request).path


def claimed_boards(name: str, parts: Sequence[Part], request: Request) -> AbstractContextManager[None]:
    """Holds the files of these parts in the output folder of a request, which the argument `name` names; see `claimed`."""
    written = [part.name for part in parts if part.kind != "read"]
    if "needle" in written:
        written.append("language")  # whose models it trains where they are missing
    sizes = {part.name: _size_of(part, request.size) for part in parts}
    files = [board_path(request.output, part, sizes.get(part, request.size)) for part in written]
    return claim_files(name, dict.fromkeys(files, is_board), "result", overwrite=False)


def forget(part: Part, request: Request) -> None:
    """Delete what the output folder of a request has of its mixers in a part, rows and trainings; all rows of another setting."""
    if part.kind == "read":
        return
    labels = [choice.label for choice in request.mixers]
    path = board_path(request.output, part.name, _size_of(part, request.size))
    if path.exists():
        try:
            board = load_board(path)
        except ResultsError:  # of another version
            board = None
        if board is None or board.setting != as_stored(_setting_of(part, request.size)):
            path.unlink()
        else:
            names = [choice.name for choice in request.mixers]
            board.drop(find_rules(names) if part.kind == "rules" else labels)
    trainings = request.trainings / f"{part.name}-{request.size}"
    for place in (trainings, *trainings.glob("*")):  # a column of a task has a folder
        for label in labels:
            remove_trainings(place / file_name(label))


def find_rules(mixers: Sequence[str]) -> tuple[str, ...]:
    """The rules of these mixers, each once; all where they are the whole registry.

    Raises:
        ValueError: a mixer whose rule cannot be measured without training, unless others can.
    """
    rules = known_rules()
    if set(mixers) >= set(MIXERS):
        return tuple(rules)
    wanted = dict.fromkeys(SAME_RULE.get(name, name) for name in mixers)
    found = tuple(name for name in wanted if name in rules)
    if not found:
        reasons = "; ".join(f"{name} {LEFT_OUT.get(name, NOT_DECLARED)}" for name in wanted)
        raise ValueError(
            f"mixers must name at least one whose rule runs without training, of {', '.join(rules)}: {reasons}"
        )
    return found


@checked
def part_rows(part: Part, size: str, folder: Path, measurements: Path) -> list[dict[str, Any]]:
    """The rows of a part that there are: measured in `folder`, or read from `measurements`."""
    check_choice("size", size, (*SIZES, RULES_SIZE))
    if part.kind == "read":
        return read_rows(part.name, measurements)
    path = board_path(folder, part.name, _size_of(part, size))
    return _in_columns(part, list(load_board(path).rows.values()) if path.exists() else [])


def rows_beside(part: Part, size: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The library's own results for the mixers that have none among `rows`, of the same part, size and setting."""
    if part.kind == "read":
        return []
    there = {row["mixer"] for row in rows}
    found = _in_columns(part, library_rows(part.name, _size_of(part, size), _setting_of(part, size)))
    return [row for row in found if row["mixer"] not in there]


def _size_of(part: Part, size: str) -> str:
    return RULES_SIZE if part.kind == "rules" else size


def _setting_of(part: Part, size: str) -> dict[str, Any]:
    """The setting of a part that is measured, as it is declared."""
    if part.kind == "rules":
        return declaration()
    if part.kind == "task":
        return SIZES[size].tasks[part.name].setting()
    language = SIZES[size].language
    return language.setting() if part.kind == "language" else needle_setting(language)


def resolution_of(part: Part, size: str) -> float | None:
    """The spread that a single seed counts as: the nats below which language models take all seeds."""
    return SIZES[size].language.close if part.kind == "language" else None


@checked
def table_of(
    part: Part, size: str, rows: Sequence[Mapping[str, Any]], mixers: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """The table of a part with a line for each of `mixers`."""
    names = tuple(known_rules()) if part.kind == "rules" else mixers
    return part_table(part, rows, names, resolution_of(part, size))


def _in_columns(part: Part, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a board as `part_table` takes them."""
    return [_as_column(row) for row in rows] if part.kind == "rules" else rows


def _as_column(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the rules as one of a mixer in a column. A distance that is not finite counts as 1e9."""
    values = [1e9 if x is None else x for x in row["distance"]]
    return {
        "column": f"{row['stream']}, d = {row['size']}", "mixer": row["rule"], "values": values, "measured": row["measured"],
    }  # fmt: skip
