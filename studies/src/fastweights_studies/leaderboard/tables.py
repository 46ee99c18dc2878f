"""The leaderboard as tables of text, for the terminal and for docs/leaderboard.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .cells import format_number
from .entries import EXACT, Entry, columns_of
from .part import Part
from .standing import Standing, places, visible_difference

__all__ = ["NOT_RUN", "Cell", "describe_visible", "part_cells", "part_table"]

NOT_RUN, DIVERGED = "not run", "diverged"
KEEPS_ALL = "softmax"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a table says of a mixer in a column.

    Attributes:
        label: of the mixer.
        text: number, place and marks, or why there are none.
        mean: the number, as perplexity where that is shown; None where all trainings diverged.
        place: as in `Standing`.
        has_learned: whether the number is better than guessing.
    """

    label: str
    text: str
    mean: float | None = None
    place: int | None = None
    has_learned: bool = False


def part_cells(part: Part, entries: Sequence[Entry]) -> dict[str, dict[str, Cell]]:
    """The cells by column and by what the first cell of a line says, the best first and those without a number last."""
    cells: dict[str, dict[str, Cell]] = {}
    for column in columns_of(entries):
        own = [entry for entry in entries if entry.column == column]
        counted = [entry for entry in own if entry.values]
        cells[column] = {_name(one.entry): _cell(part, one) for one in places(counted, part.better)}
        cells[column] |= {_name(entry): Cell(label=entry.label, text=DIVERGED) for entry in own if not entry.values}
    return cells


def part_table(part: Part, entries: Iterable[Entry], mixers: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and lines: one line per mixer, the best mean over all columns first, then those that lack columns, then those whose
    trainings all diverged (entries without values), then those of `mixers` that were not run."""
    entries = list(entries)
    cells = part_cells(part, entries)
    columns = list(cells)
    values = {
        name: [entry.mean for entry in entries if _name(entry) == name and entry.values] for name in map(_name, entries)
    }
    sign = -1.0 if part.better == "higher" else 1.0

    def order(name: str) -> tuple[int, float]:
        return len(columns) - len(values[name]), sign * statistics.fmean(values[name])

    measured = sorted(dict.fromkeys(name for column in columns for name in cells[column] if values[name]), key=order)
    measured += [name for name in values if not values[name]]  # these have diverged
    there = {entry.label for entry in entries}
    missing = [name for name in mixers if name not in there]
    trained = any("parameters" in entry.run for entry in entries)
    own = {name: {entry.column: entry for entry in entries if _name(entry) == name} for name in measured}
    found = {(entry.column, row.measure) for entry in entries for row in entry.rows}
    beside = [(column, measure) for measure in part.beside for column in columns if (column, measure) in found]
    lines = [
        [
            name + " (keeps every token)" * (name == KEEPS_ALL),
            *(_sizes(list(own[name].values())) if trained else ()),
            *(cells[column][name].text if name in cells[column] else NOT_RUN for column in columns),
            *(_beside(own[name][column], measure) if column in own[name] else NOT_RUN for column, measure in beside),
        ]
        for name in measured
    ]
    lines += [[name, *[""] * (2 * trained), *[NOT_RUN] * max(1, len(columns) + len(beside))] for name in missing]
    titles = [f"{column}, {part.beside[measure]}" for column, measure in beside]
    head = ["mixer", *(("state", "parameters") if trained else ()), *(columns or [part.measure]), *titles]
    references = [_reference(entries, column) for column in columns]
    if any(references):
        lines.insert(0, ["*exact ridge regression*", *[""] * (2 * trained), *references])
    return head, lines


def describe_visible(part: Part, entries: Sequence[Entry]) -> str:
    """The smallest differences that the seeds could have shown, in a line; "" where no two mixers have two seeds."""
    own = {column: [entry for entry in entries if entry.column == column] for column in columns_of(entries)}
    found = {name: visible_difference(column) for name, column in own.items()}
    sizes = [f"{name}: {_say_visible(part, size)}" for name, size in found.items() if size is not None]
    if not sizes:
        return ""
    unit = " in nats" * (part.measure == "perplexity")
    return (
        "Smallest difference that the seeds could have shown in four of five repetitions, the median of the comparisons of a "
        f"column{unit}: {'; '.join(sizes)}. Where it is larger than any two mixers can differ, the seeds are too few to rank "
        "most of them."
    )


def _say_visible(part: Part, size: float) -> str:
    """Accuracies differ by 1 at most."""
    return "more than 1" if part.measure == "accuracy" and size > 1 else format_number(size)


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


def _beside(entry: Entry, measure: str) -> str:
    """The mean of another measure over the seeds that have it, and how many these are where some have not."""
    values, wanted = entry.of(measure), sum(row.measure == measure for row in entry.rows)
    if not wanted:
        return NOT_RUN
    if not values:
        return "never"
    mean = statistics.fmean(values)
    text = format_number(mean) if mean < 1 else f"{mean:,.0f}"
    return text + f" ({len(values)} of {wanted} seeds)" * (len(values) < wanted)


def _reference(entries: Sequence[Entry], column: str) -> str:
    exact = next((found for entry in entries if entry.column == column and (found := entry.of(EXACT))), None)
    return "" if exact is None else format_number(statistics.fmean(exact))


def _cell(part: Part, standing: Standing) -> Cell:
    entry, guesses = standing.entry, part.guesses(standing.entry)
    marks = {"*": part.marks_learning and entry.undertrained, "!": entry.diverged, "°": guesses}
    return Cell(
        label=entry.label,
        text=part.format(standing) + "".join(mark for mark, is_set in marks.items() if is_set),
        mean=part.shown(standing)[0],
        place=standing.place,
        has_learned=not guesses,
    )
