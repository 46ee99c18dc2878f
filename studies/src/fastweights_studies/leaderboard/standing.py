"""Who is ahead: places in which a difference inside the spread of seeds is a tie."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastweights.checks import check_choice, check_number
from fastweights.kinds import checked

from ..paired import Difference, compare_family
from .entries import Entry

__all__ = ["Standing", "compare_entries", "paired_places", "places", "visible_difference"]


@checked
@dataclass(frozen=True)
class Standing:
    """A mixer in a column.

    Attributes:
        mean: over its seeds. spread: the largest minus the smallest value; None with a single seed.
        place: 1 and the number of mixers that are better and not tied with it; None where seeds do not tell.
        tied: whether it is tied with another mixer.
    """

    entry: Entry
    mean: float
    spread: float | None
    place: int | None
    tied: bool


@checked
def places(entries: Sequence[Entry], better: str, resolution: float | None = None) -> list[Standing]:
    """The mixers of one column, the best first.

    Two are tied where the ranges of their seeds overlap, or lie no further apart than the smaller range is wide. Two with a
    single seed are tied within `resolution`; where that is None nothing is known about such mixers, and none has a place.

    Args:
        entries: each with a finite value of a seed at least.
        better: "higher" or "lower".
    """
    check_choice("better", better, ("higher", "lower"))
    if resolution is not None:
        check_number("resolution", resolution, low=0)
    ranges = [_range(entry.values, resolution or 0.0) for entry in entries]
    known = resolution is not None or all(len(entry.values) > 1 for entry in entries)

    def are_apart(one: int, other: int) -> bool:
        (_, end), (start, _) = sorted((ranges[one], ranges[other]))
        return start - end > min(high - low for low, high in (ranges[one], ranges[other]))

    apart = {pair for pair in itertools.combinations(range(len(entries)), 2) if are_apart(*pair)}
    return _order(entries, better, apart, [known] * len(entries))


@checked
def paired_places(entries: Sequence[Entry], better: str) -> list[Standing]:
    """The mixers of one column, the best first. Two are tied where the interval of their paired difference holds zero, with
    Holm's correction over all comparisons of the column. A mixer with one seed has no place, and is tied with every other one.
    """
    check_choice("better", better, ("higher", "lower"))
    apart = [pair for pair, found in compare_entries(entries).items() if not found.tied]
    return _order(entries, better, apart, [len(entry.values) > 1 for entry in entries])


def compare_entries(entries: Sequence[Entry]) -> dict[tuple[int, int], Difference]:
    """The differences of all mixers of a column that share two seeds, by their numbers in `entries`, as one family."""
    values = [entry.by_seed for entry in entries]
    pairs = itertools.combinations(range(len(entries)), 2)
    return compare_family(
        {
            (one, other): (values[one], values[other])
            for one, other in pairs
            if len({*values[one]} & {*values[other]}) > 1
        }
    )


def _order(
    entries: Sequence[Entry], better: str, apart: Collection[tuple[int, int]], known: Sequence[bool]
) -> list[Standing]:
    """The mixers, the best first. apart: pairs of their numbers, the smaller one first, that are not tied. known: which have a
    place."""
    sign = -1.0 if better == "higher" else 1.0
    found = []
    for one, entry in sorted(enumerate(entries), key=lambda numbered: sign * numbered[1].mean):
        others = [other for other in range(len(entries)) if other != one]
        untied = [other for other in others if (min(one, other), max(one, other)) in apart]
        ahead = sum(sign * entries[other].mean < sign * entry.mean for other in untied)
        spread = max(entry.values) - min(entry.values) if len(entry.values) > 1 else None
        place, tied = (1 + ahead, len(untied) < len(others)) if known[one] else (None, False)
        found.append(Standing(entry, entry.mean, spread, place, tied))
    return found


def visible_difference(entries: Sequence[Entry]) -> float | None:
    """The smallest difference that the seeds of a column could have shown, the median of its comparisons; None without any."""
    found = [one.visible for one in compare_entries(entries).values()]
    return statistics.median(found) if found else None


def _range(values: Sequence[float], resolution: float) -> tuple[float, float]:
    """Of the seeds; of a single one as wide as makes two of them tied within the resolution."""
    margin = resolution / 4 if len(values) == 1 else 0.0
    return min(values) - margin, max(values) + margin
