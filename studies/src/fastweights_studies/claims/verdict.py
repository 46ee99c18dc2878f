"""What the rule of a claim comes to, and what rules are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from fastweights.kinds import checked

from ..paired import Difference, compare_family

__all__ = [
    "INTERVALS",
    "STATUSES",
    "Status",
    "Verdict",
    "compare_seeds",
    "decide_lost",
    "decided",
    "settle",
]

Name = TypeVar("Name")
Values = Mapping[int, float]
INTERVALS = (
    "Changed after the runs: a difference counts where its 95% interval by t over paired seeds, with Holm's correction over the "
    "comparisons of the claim, does not hold zero; standard errors decided before."
)
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


def compare_seeds(pairs: Mapping[Name, tuple[Values, Values]]) -> dict[Name, Difference]:
    """The paired differences left - right of all comparisons that a claim makes, with Holm's correction over them.

    A difference of which two seeds are not finite on both sides has no interval, and tells nothing.

    Args:
        pairs: of each comparison by name, the values of left and right by seed (`Measurement.by_seed`).
    """
    found: dict[Name, dict[int, float]] = {
        name: {seed: left[seed] - right[seed] for seed in left if seed in right}
        for name, (left, right) in pairs.items()
    }
    finite = {name: {seed: x for seed, x in own.items() if math.isfinite(x)} for name, own in found.items()}
    several = compare_family({name: (own, dict.fromkeys(own, 0.0)) for name, own in finite.items() if len(own) > 1})
    return {name: several.get(name) or _of_one_seed(own) for name, own in finite.items()}


def _of_one_seed(differences: Mapping[int, float]) -> Difference:
    return Difference(
        mean=next(iter(differences.values()), math.nan), low=-math.inf, high=math.inf, confidence=0.95, p=1.0,
        seeds=len(differences), deviation=math.inf,
    )  # fmt: skip


def settle(outcome: Callable[..., Status], *parts: int) -> Status:
    """What a claim of several parts comes to: "not resolved" where that depends on a part that is open, unless it holds at least
    weakly either way.

    Args:
        outcome: the status, given whether each part is so.
        parts: 1 where a part is so, -1 where it is not, 0 where that is open.
    """
    ways = itertools.product(*((True, False) if part == 0 else (part > 0,) for part in parts))
    found = {outcome(*way) for way in ways}
    if found == {"holds", "holds weakly"}:
        return "holds weakly"
    return found.pop() if len(found) == 1 else "not resolved"
