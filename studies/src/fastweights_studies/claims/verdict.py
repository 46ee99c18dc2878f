"""What the rule of a claim comes to, and what rules are made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fastweights.kinds import checked

from .measurement import standard_error

__all__ = ["STATUSES", "Status", "Verdict", "clear_sign", "decide_lost", "decided", "pair_seeds"]

Status = Literal["holds", "holds weakly", "does not hold", "not resolved", "not testable here"]
STATUSES: tuple[Status, ...] = get_args(Status)


@checked
@dataclass(frozen=True)
class Verdict:
    """What the rule of a claim says of the measured numbers.

    Attributes:
        statements: with the numbers that decided, in parts that a page may show apart; a text is one part.
    """

    status: Status
    statements: str | Sequence[str]

    def __post_init__(self) -> None:
        parts = [self.statements] if isinstance(self.statements, str) else self.statements
        object.__setattr__(self, "statements", tuple(parts))

    @property
    def reason(self) -> str:
        return "; ".join(self.statements)


def decided(holds: bool, *statements: str) -> Verdict:
    return Verdict("holds" if holds else "does not hold", statements)


def decide_lost(lost: Sequence[str]) -> Verdict:
    """What a claim comes to that needs trainings which were lost: those of these labels."""
    return Verdict("not resolved", f"the loss did not stay finite: {', '.join(lost)}")


def pair_seeds(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Mean of left - right over the seeds that both share, and its standard error."""
    differences = [x - y for x, y in zip(left, right, strict=True)]
    return statistics.fmean(differences), standard_error(differences)


def clear_sign(difference: float, error: float, errors: float = 2.0) -> int:
    """1 or -1 where a difference exceeds this many standard errors; 0 for a tie, and where the error is NaN."""
    return int(difference > errors * error) - int(difference < -errors * error)
