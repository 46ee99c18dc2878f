"""Who is ahead: places in which a difference inside the spread of seeds is a tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastweights.checks import check_choice, check_number
from fastweights.kinds import checked

from .entries import Entry

__all__ = ["Standing", "places"]


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
    sign = -1.0 if better == "higher" else 1.0
    ranges = [_range(entry.values, resolution or 0.0) for entry in entries]
    known = resolution is not None or all(len(entry.values) > 1 for entry in entries)

    def are_apart(one: int, other: int) -> bool:
        (_, end), (start, _) = sorted((ranges[one], ranges[other]))
        return start - end > min(high - low for low, high in (ranges[one], ranges[other]))

    found = []
    for one, entry in sorted(enumerate(entries), key=lambda numbered: sign * numbered[1].mean):
        others = [other for other in range(len(entries)) if other != one]
        ahead = sum(sign * entries[other].mean < sign * entry.mean and are_apart(one, other) for other in others)
        tied = any(not are_apart(one, other) for other in others)
        spread = max(entry.values) - min(entry.values) if len(entry.values) > 1 else None
        found.append(Standing(entry, entry.mean, spread, 1 + ahead if known else None, tied and known))
    return found


def _range(values: Sequence[float], resolution: float) -> tuple[float, float]:
    """Of the seeds; of a single one as wide as makes two of them tied within the resolution."""
    margin = resolution / 4 if len(values) == 1 else 0.0
    return min(values) - margin, max(values) + margin
