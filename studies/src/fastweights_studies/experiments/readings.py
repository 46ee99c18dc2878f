"""Two readings of the claims about the recall of Variational Linear Attention, which differ in the size of first weights.

The paper prints none, and fastweights_studies.measure.vla_first_weights found 8 pairs recalled from 0.05, and guessed from
0.02.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, Literal

from .claim import Measurement, Status, Verdict
from .trained import accuracy, diverged_trainings

__all__ = [
    "APART",
    "BETTER_OUTCOME",
    "SECOND",
    "SECOND_NOTE",
    "SECOND_READING",
    "MeanAccuracy",
    "by_seed",
    "decide_readings",
    "far_apart",
    "with_second_reading",
]

SECOND = "first weights 0.05"
SECOND_READING = "Second reading, declared after the first was run: first weights of 0.05 in place of 0.02."
APART = (
    "Added after the runs: a reading is not resolved where seeds lie more than 0.2 apart and come to different outcomes, each by "
    "itself; this counts before 'does not hold' of the other reading."
)
BETTER_OUTCOME = f"The better outcome of the two readings counts. {APART}"
SECOND_NOTE = "the second reading was chosen after vla had learned 8 pairs from its first weights"
SPLIT: Final = "seeds do not agree"
Outcome = Status | Literal["seeds do not agree"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "holds weakly", SPLIT, "does not hold", "not resolved")  # the best first
FAR_APART = 0.2  # accuracies of seeds, whose mean says little

# Of a mixer, a number of pairs and a part: the mean over seeds in one of the readings, or the accuracy of one seed.
MeanAccuracy = Callable[..., float]


def with_second_reading(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parts of an experiment, and each of them once more with larger first weights."""
    again = {_in_reading(part, SECOND): {**settings, "initializer_range": 0.05} for part, settings in parts.items()}
    return {**parts, **again}


def decide_readings(decide: Callable[[MeanAccuracy], Verdict]) -> Callable[[Measurement], Verdict]:
    """The better outcome of the two readings, with the reasons of both."""

    def decide_both(found: Measurement) -> Verdict:
        readings = {
            "first weights 0.02": _decide_reading(decide, found, ""),
            SECOND: _decide_reading(decide, found, SECOND),
        }
        reason = "; ".join(f"{name}: {reason} ({outcome})" for name, (outcome, reason) in readings.items())
        best = min((outcome for outcome, _ in readings.values()), key=OUTCOMES.index)
        return Verdict("not resolved" if best == SPLIT else best, reason)

    return decide_both


def _decide_reading(decide: Callable[[MeanAccuracy], Verdict], found: Measurement, reading: str) -> tuple[Outcome, str]:
    """The outcome of one reading, and why: with all seeds where they lie far apart, and the trainings that diverged."""
    read: dict[str, str] = {}  # name in the reason: name of the number

    def of_reading(over_seeds: Callable[[Sequence[float]], float]) -> MeanAccuracy:
        def value(mixer: str, pairs: int, part: str = "") -> float:
            name = read[accuracy(mixer, pairs, part)] = accuracy(mixer, pairs, _in_reading(part, reading))
            return over_seeds(found.values[name])

        return value

    verdict = decide(of_reading(statistics.fmean))
    values = {name: found.values[number] for name, number in read.items()}
    apart = [f"{name}: {by_seed(row)}" for name, row in values.items() if far_apart(row)]
    diverged = [
        f"{found.mean(diverged_trainings(number)):.0f} of {name}"
        for name, number in read.items()
        if diverged_trainings(number) in found.values
    ]
    (seeds,) = set(map(len, values.values()))
    alone = [decide(of_reading(itemgetter(seed))).status for seed in range(seeds)]
    details = {
        "by seed": apart,
        "seeds by themselves": [", ".join(alone)] * bool(apart),
        "diverged trainings": diverged,
    }
    reason = "; ".join(
        [verdict.reason, *(f"{what}: {'; '.join(rows)}" for what, rows in details.items() if rows)]
        + ["one seed"] * (seeds == 1)
    )
    return (SPLIT if apart and len(set(alone)) > 1 else verdict.status), reason


def far_apart(values: Sequence[float]) -> bool:
    return max(values) - min(values) > FAR_APART


def by_seed(values: Sequence[float]) -> str:
    return ", ".join(f"{x:.3f}" for x in values)


def _in_reading(part: str, reading: str) -> str:
    """The name of a part in a reading; "" is the first one."""
    return ", ".join(filter(None, [part, reading]))
