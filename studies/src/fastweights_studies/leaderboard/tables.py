"""The leaderboard as tables of text, for the terminal and for docs/leaderboard.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .cells import format_number
from .entries import EXACT, Entry, columns_of
from .part import Part
from .standing import Standing, places

__all__ = ["NOT_RUN", "part_table"]

NOT_RUN, DIVERGED = "not run", "diverged"
KEEPS_ALL = "softmax"


def part_table(
    part: Part, entries: Iterable[Entry], mixers: Sequence[str], resolution: float | None = None
) -> tuple[list[str], list[list[str]]]:
    """Head and lines: one line per mixer, the best mean over all columns first, then those that lack columns, then those whose
    trainings all diverged (entries without values), then those of `mixers` that were not run.

    resolution: the spread that a single seed counts as.
    """
    entries = list(entries)
    columns = columns_of(entries)
    standings = {
        column: {
            _name(one.entry): one
            for one in places(
                [entry for entry in entries if entry.column == column and entry.values], part.better, resolution
            )
        }
        for column in columns
    }
    sign = -1.0 if part.better == "higher" else 1.0

    def order(name: str) -> tuple[int, float]:
        means = [standings[column][name].mean for column in columns if name in standings[column]]
        return len(columns) - len(means), sign * statistics.fmean(means)

    measured = sorted(dict.fromkeys(name for column in columns for name in standings[column]), key=order)
    measured += dict.fromkeys(name for name in map(_name, entries) if name not in measured)  # these have diverged
    there = {entry.label for entry in entries}
    missing = [name for name in mixers if name not in there]
    trained = any("parameters" in entry.run for entry in entries)
    own = {name: {entry.column: entry for entry in entries if _name(entry) == name} for name in measured}
    lines = [
        [
            name + " (keeps every token)" * (name == KEEPS_ALL),
            *(_sizes(list(own[name].values())) if trained else ()),
            *(_cell(part, own[name].get(column), standings[column].get(name)) for column in columns),
        ]
        for name in measured
    ]
    lines += [[name, *[""] * (2 * trained), *[NOT_RUN] * max(1, len(columns))] for name in missing]
    head = ["mixer", *(("state", "parameters") if trained else ()), *(columns or [part.measure])]
    references = [_reference(entries, column) for column in columns]
    if any(references):
        lines.insert(0, ["*exact ridge regression*", *[""] * (2 * trained), *references])
    return head, lines


def _name(entry: Entry) -> str:
    """What the first cell of a line says."""
    return entry.label + entry.detail


def _sizes(entries: Sequence[Entry]) -> tuple[str, str]:
    """State and parameters of a mixer, the smallest and the largest where columns differ."""
    state, parameters = (
        " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
        for sizes in ([entry.count(name) for entry in entries] for name in ("state", "parameters"))
    )
    return state + " (grows)" * bool(entries[0].run["grows"]), parameters


def _reference(entries: Sequence[Entry], column: str) -> str:
    exact = next((found for entry in entries if entry.column == column and (found := entry.of(EXACT))), None)
    return "" if exact is None else format_number(statistics.fmean(exact))


def _cell(part: Part, entry: Entry | None, standing: Standing | None) -> str:
    if entry is None:
        return NOT_RUN
    if standing is None:
        return DIVERGED
    marks = {"*": part.marks_learning and entry.undertrained, "!": entry.diverged, "°": part.guesses(entry)}
    return part.format(standing) + "".join(mark for mark, is_set in marks.items() if is_set)
