"""Who is ahead: places in which a difference inside the spread of seeds is a tie."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastweights.checks import check_choice, check_number
from fastweights.kinds import checked

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

    row: Mapping[str, Any]
    mean: float
    spread: float | None
    place: int | None
    tied: bool


@checked
def places(rows: Sequence[Mapping[str, Any]], better: str, resolution: float | None = None) -> list[Standing]:
    """The rows of one column, the best first.

    Two rows are tied where the ranges of their seeds overlap, or lie no further apart than the smaller range is wide. Two rows
    with a single seed are tied within `resolution`; where that is None nothing is known about such rows, and no row has a place.

    Args:
        rows: each with `values`, one per seed.
        better: "higher" or "lower".
    """
    check_choice("better", better, ("higher", "lower"))
    if resolution is not None:
        check_number("resolution", resolution, low=0)
    sign = -1.0 if better == "higher" else 1.0
    means = [statistics.fmean(row["values"]) for row in rows]
    ranges = [_range(row["values"], resolution or 0.0) for row in rows]
    known = resolution is not None or all(len(row["values"]) > 1 for row in rows)

    def apart(one: int, other: int) -> bool:
        (_, end), (start, _) = sorted((ranges[one], ranges[other]))
        return start - end > min(high - low for low, high in (ranges[one], ranges[other]))

    found = []
    for one in sorted(range(len(rows)), key=lambda place: sign * means[place]):
        others = [other for other in range(len(rows)) if other != one]
        ahead = sum(sign * means[other] < sign * means[one] and apart(one, other) for other in others)
        tied = any(not apart(one, other) for other in others)
        spread = max(rows[one]["values"]) - min(rows[one]["values"]) if len(rows[one]["values"]) > 1 else None
        found.append(Standing(rows[one], means[one], spread, 1 + ahead if known else None, tied and known))
    return found


def _range(values: Sequence[float], resolution: float) -> tuple[float, float]:
    """Of the seeds; of a single one as wide as makes two of them tied within the resolution."""
    margin = resolution / 4 if len(values) == 1 else 0.0
    return min(values) - margin, max(values) + margin
