"""The leaderboard as tables of text, for the terminal and for docs/leaderboard.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .measured import mixer_of
from .parts import Part
from .standing import Standing, places

__all__ = [
    "KEEPS_ALL",
    "LEARNING",
    "MARKS",
    "NOT_RUN",
    "READ",
    "TIES",
    "UNMARKED",
    "columns_of",
    "explanation",
    "part_table",
]

NOT_RUN, DIVERGED = "not run", "diverged"
FEWEST_TESTED = 512  # sequences
KEEPS_ALL = "softmax"
TIES = (
    "The place in parentheses is 1 and the number of mixers that are better and not tied. = marks a tie: ranges of seeds that "
    "overlap, or lie no further apart than the narrower one is wide."
)
LEARNING = "* marks a run whose loss was still falling at the end, or that is too short to tell."
UNMARKED = (
    "Whether a language model was still learning is not marked: in the last fifth of so short a training the loss varies between "
    "batches by more than it falls. All of them count as still learning."
)
MARKS = (
    "Numbers are means over seeds, with half the spread after ±; those without ± are of one seed.",
    TIES,
    LEARNING,
    "! marks a mixer of which some runs diverged.",
    "° marks a mixer that is no better than guessing, or finds no needle: it has not begun to learn the task, and nothing "
    "follows about its memory.",
)
READ = (
    "Medians over repeated steps, of one run on one machine, with 8 heads of 128 for every mixer: states are not equal."
)


def part_table(
    part: Part, rows: Iterable[Mapping[str, Any]], mixers: Sequence[str], resolution: float | None = None
) -> tuple[list[str], list[list[str]]]:
    """Head and lines: one line per mixer, the best mean over all columns first, then those that lack columns, then those whose
    trainings all diverged (rows without values), then those of `mixers` that were not run.

    resolution: the spread that a single seed counts as.
    """
    rows = list(rows)
    columns = columns_of(rows)
    standings = {
        column: {
            one.row["mixer"]: one
            for one in places(
                [row for row in rows if row["column"] == column and row["values"]], part.better, resolution
            )
        }
        for column in columns
    }
    sign = -1.0 if part.better == "higher" else 1.0

    def order(name: str) -> tuple[int, float]:
        means = [standings[column][name].mean for column in columns if name in standings[column]]
        return len(columns) - len(means), sign * statistics.fmean(means)

    measured = sorted(dict.fromkeys(name for column in columns for name in standings[column]), key=order)
    measured += dict.fromkeys(row["mixer"] for row in rows if row["mixer"] not in measured)  # these have diverged
    missing = [name for name in mixers if name not in set(map(mixer_of, measured))]
    trained = any("parameters" in row for row in rows)
    rows_of = {name: [row for row in rows if row["mixer"] == name] for name in measured}
    lines = [
        [
            name + " (keeps every token)" * (name == KEEPS_ALL),
            *(_sizes(rows_of[name]) if trained else ()),
            *(_cell(part, rows_of[name], column, standings[column].get(name)) for column in columns),
        ]
        for name in measured
    ]
    lines += [[name, *[""] * (2 * trained), *[NOT_RUN] * max(1, len(columns))] for name in missing]
    head = ["mixer", *(("state", "parameters") if trained else ()), *(columns or [part.measure])]
    references = [_reference(rows, column) for column in columns]
    if any(references):
        lines.insert(0, ["*exact ridge regression*", *[""] * (2 * trained), *references])
    return head, lines


def explanation(part: Part) -> str:
    """How a table is read, in a line or two."""
    marks = (UNMARKED if mark == LEARNING and not part.marks_learning else mark for mark in MARKS)
    how = {"read": READ, "rules": "Means over seeds, with half the spread after ±, and the place."}.get(
        part.kind, " ".join(marks)
    )
    return f"{part.measure[0].upper()}{part.measure[1:]}, {part.better} is better. {how}"


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns in the order in which they first appear."""
    return list(dict.fromkeys(row["column"] for row in rows))


def _sizes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """State and parameters of a mixer, the smallest and the largest where columns differ."""
    state, parameters = (
        " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
        for sizes in ([row[name] for row in rows] for name in ("state", "parameters"))
    )
    return state + " (grows)" * rows[0]["grows"], parameters


def _reference(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    exact = next((row["exact"] for row in rows if row["column"] == column and row.get("exact") is not None), None)
    return "" if exact is None else _number(exact)


def _cell(part: Part, rows: Sequence[Mapping[str, Any]], column: str, standing: Standing | None) -> str:
    """rows: of the mixer."""
    if standing is None:
        return DIVERGED if any(row["column"] == column for row in rows) else NOT_RUN
    perplexity = part.kind == "language"
    mean = math.exp(standing.mean) if perplexity else standing.mean
    spread = standing.spread
    text = _number(mean)
    if spread is not None and part.kind != "read":
        text += f" ±{_number(mean * math.expm1(spread / 2) if perplexity else spread / 2, like=mean)}"
    if standing.place is not None and part.kind != "read":
        text += f" ({standing.place}{'=' * standing.tied})"
    row = standing.row
    learning = part.marks_learning and row.get("undertrained")
    marks = {"*": learning, "!": row.get("diverged"), "°": guesses(part, row)}
    return text + "".join(mark for mark, is_set in marks.items() if is_set)


def guesses(part: Part, row: Mapping[str, Any]) -> bool:
    """Whether a trained model is no better than guessing: within three standard errors of it over the sequences of a test, or
    within 2% of the error of predicting zero; or has found no needle."""
    if "found" in row:
        return not any(row["found"])
    chance = row.get("chance")
    if chance is None:
        return False
    mean = statistics.fmean(row["values"])
    if part.better == "lower":
        return mean >= 0.98 * chance
    return mean <= chance + 3 * math.sqrt(chance * (1 - chance) / FEWEST_TESTED)


def _number(x: float, like: float | None = None) -> str:
    """Three digits, or the decimals of a number beside it."""
    size = abs(x if like is None else like)
    decimals = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{x:,.{decimals}f}"
