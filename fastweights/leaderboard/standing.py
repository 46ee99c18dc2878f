"""Who is ahead: places in which a difference inside the spread of seeds is a tie."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Standing", "places"]


@dataclass(frozen=True)
class Standing:
    """A mixer in a column.

    Attributes:
        mean: over its seeds. spread: the largest minus the smallest value; None with a single seed.
        place: 1 and the number of mixers that are better by more than the spread; None where seeds do not tell.
        tied: whether another mixer has the same place or cannot be told from it.
    """

    row: Mapping[str, Any]
    mean: float
    spread: float | None
    place: int | None
    tied: bool


def places(rows: Sequence[Mapping[str, Any]], better: str, resolution: float | None = None) -> list[Standing]:
    """The rows of one column, the best first.

    Two rows tie where their means differ by no more than the larger of their spreads. A row with a single seed has the spread
    `resolution`; where that is None nothing is known about it, and no row has a place.

    Args:
        rows: each with `values`, one per seed.
        better: "higher" or "lower".
    """
    sign = -1.0 if better == "higher" else 1.0
    means = [statistics.fmean(row["values"]) for row in rows]
    spreads = [max(row["values"]) - min(row["values"]) if len(row["values"]) > 1 else resolution for row in rows]
    known = all(spread is not None for spread in spreads)

    def apart(one: int, other: int) -> bool:
        return abs(means[one] - means[other]) > max(spreads[one] or 0.0, spreads[other] or 0.0)

    found = []
    for one in sorted(range(len(rows)), key=lambda place: sign * means[place]):
        others = [other for other in range(len(rows)) if other != one]
        ahead = sum(sign * means[other] < sign * means[one] and apart(one, other) for other in others)
        tied = any(not apart(one, other) for other in others)
        spread = spreads[one] if len(rows[one]["values"]) > 1 else None
        found.append(Standing(rows[one], means[one], spread, 1 + ahead if known else None, tied and known))
    return found
