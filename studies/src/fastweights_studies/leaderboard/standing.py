"""Who is ahead: places in which a paired difference whose interval holds zero is a tie."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fastweights.checks import check_choice
from fastweights.kinds import checked

from ..paired import Difference, Values, compare_family
from .entries import Entry

__all__ = ["Standing", "compare_entries", "places", "visible_difference"]


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
def places(entries: Sequence[Entry], better: str) -> list[Standing]:
    """The mixers of one column, the best first. Two are tied where the interval of their paired difference holds zero, with
    Holm's correction over the comparisons of the column with as many shared seeds (`compare_entries`). One that shares two seeds
    with fewer than half of the others has no place, and is tied with those that it cannot be compared with.

    Args:
        entries: each with a finite value of a seed at least.
        better: "higher" or "lower".
    """
    check_choice("better", better, ("higher", "lower"))
    compared = compare_entries(entries)
    sign = -1.0 if better == "higher" else 1.0
    found = []
    for one, entry in sorted(enumerate(entries), key=lambda numbered: sign * numbered[1].mean):
        own = {sum(pair) - one: difference for pair, difference in compared.items() if one in pair}
        untied = [other for other, difference in own.items() if not difference.tied]
        ahead = sum(sign * entries[other].mean < sign * entry.mean for other in untied)
        others, several = len(entries) - 1, len(entry.values) > 1
        spread = max(entry.values) - min(entry.values) if several else None
        known = several and 2 * len(own) >= others
        place, tied = (1 + ahead, len(untied) < others) if known else (None, False)
        found.append(Standing(entry, entry.mean, spread, place, tied))
    return found


def compare_entries(entries: Sequence[Entry]) -> dict[tuple[int, int], Difference]:
    """The differences of all mixers of a column that share two seeds, by their numbers in `entries`.

    Comparisons with the same number of shared seeds are one family. Otherwise a part that trains twelve rules with five seeds and
    the others with two would correct the 66 comparisons of the twelve for all 630.
    """
    values = [entry.by_seed for entry in entries]
    families: dict[int, dict[tuple[int, int], tuple[Values, Values]]] = {}  # by the number of shared seeds
    for one, other in itertools.combinations(range(len(entries)), 2):
        shared = len(values[one].keys() & values[other].keys())
        if shared > 1:
            families.setdefault(shared, {})[one, other] = (values[one], values[other])
    found = [one for family in families.values() for one in compare_family(family).items()]
    return dict(sorted(found, key=lambda one: one[0]))


def visible_difference(entries: Sequence[Entry]) -> float | None:
    """The smallest difference that the seeds of a column could have shown, the median of its comparisons; None without any."""
    found = [one.visible for one in compare_entries(entries).values()]
    return statistics.median(found) if found else None
