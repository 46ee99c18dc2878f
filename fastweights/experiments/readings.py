"""Two readings of the claims about the recall of Variational Linear Attention, which differ in the size of first weights.

The paper prints none, and benchmarks/vla_first_weights.py found 8 pairs recalled from 0.05, and guessed from 0.02.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from .claim import Measurement, Verdict
from .trained import accuracy

__all__ = [
    "BETTER_OUTCOME",
    "SECOND",
    "SECOND_NOTE",
    "SECOND_READING",
    "MeanAccuracy",
    "decide_readings",
    "with_second_reading",
]

SECOND = "first weights 0.05"
SECOND_READING = "Second reading, declared after the first was run: first weights of 0.05 in place of 0.02."
BETTER_OUTCOME = "The better outcome of the two readings counts."
SECOND_NOTE = "the second reading was chosen after vla had learned 8 pairs from its first weights"
OUTCOMES = ("holds", "holds weakly", "does not hold", "not resolved")  # the best first
FAR_APART = 0.2  # accuracies of seeds, whose mean says little

# Of a mixer, a number of pairs and a part: the mean over seeds in one of the readings.
MeanAccuracy = Callable[..., float]


def with_second_reading(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parts of an experiment, and each of them once more with larger first weights."""
    again = {_in_reading(part, SECOND): {**settings, "initializer_range": 0.05} for part, settings in parts.items()}
    return {**parts, **again}


def decide_readings(decide: Callable[[MeanAccuracy], Verdict]) -> Callable[[Measurement], Verdict]:
    """The better outcome of the two readings, with the reasons of both."""

    def decide_both(found: Measurement) -> Verdict:
        verdicts = {
            "first weights 0.02": _decide_reading(decide, found, ""),
            SECOND: _decide_reading(decide, found, SECOND),
        }
        reason = "; ".join(f"{name}: {verdict.reason} ({verdict.status})" for name, verdict in verdicts.items())
        return Verdict(min((verdict.status for verdict in verdicts.values()), key=OUTCOMES.index), reason)

    return decide_both


def _decide_reading(decide: Callable[[MeanAccuracy], Verdict], found: Measurement, reading: str) -> Verdict:
    """The verdict on one reading. Its reason has all seeds of a mean where they lie far apart."""
    apart = {}

    def mean(mixer: str, pairs: int, part: str = "") -> float:
        values = found.values[accuracy(mixer, pairs, _in_reading(part, reading))]
        if max(values) - min(values) > FAR_APART:
            apart[accuracy(mixer, pairs, part)] = ", ".join(f"{x:.3f}" for x in values)
        return statistics.fmean(values)

    verdict = decide(mean)
    seeds = "; ".join(f"{name}: {values}" for name, values in apart.items())
    return Verdict(verdict.status, f"{verdict.reason}; by seed: {seeds}" if seeds else verdict.reason)


def _in_reading(part: str, reading: str) -> str:
    """The name of a part in a reading; "" is the first one."""
    return ", ".join(filter(None, [part, reading]))
