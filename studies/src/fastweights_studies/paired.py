"""Differences of two trained models over the seeds that both have: intervals, Holm's correction, and what could have been seen.

The seed of a training decides its data and its first weights outside the memory, so that two models of one seed differ by less
than two of different seeds, and differences are taken seed by seed.

Symbols: d_1 .. d_n differences, m their mean, s their standard deviation, t_q the quantile q of Student's t with n - 1 degrees of
freedom, a = 1 - confidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np
from scipy import optimize, special, stats

from fastweights.checks import check_choice, check_number
from fastweights.kinds import checked

__all__ = ["Difference", "adjust_holm", "compare", "compare_family", "compare_with_one", "smallest_visible"]

CONFIDENCE, POWER = 0.95, 0.8
ONE_SEED = "one seed"
RESAMPLES = 9999
Name = TypeVar("Name")
Method = Literal["t", "bootstrap"]
Values = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """left - right over the seeds of both.

    Attributes:
        mean: m. low, high: the limits of its interval, infinite for one seed. confidence: that of the interval.
        p: two-sided probability of a mean this far from zero if there were no difference; after Holm's correction in a family.
        seeds: n. deviation: s, infinite for one seed.
    """

    mean: float
    low: float
    high: float
    confidence: float
    p: float
    seeds: int
    deviation: float

    @property
    def visible(self) -> float:
        """The smallest difference that n seeds with this s show in four of five repetitions (`smallest_visible`)."""
        if self.seeds < 2:
            return math.inf
        return smallest_visible(self.deviation, self.seeds, confidence=self.confidence)

    @property
    def tied(self) -> bool:
        """Whether the interval holds zero."""
        return self.low <= 0 <= self.high

    @property
    def sign(self) -> int:
        """1 or -1 where left is above or below right, 0 for a tie."""
        return 0 if self.tied else int(math.copysign(1, self.mean))

    def within(self, limit: float) -> int:
        """1 where the interval lies within +-limit, -1 where it lies beyond, 0 where it tells neither."""
        if -limit <= self.low and self.high <= limit:
            return 1
        return -int(self.low > limit or self.high < -limit)

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.3g} ({ONE_SEED})"
        text = f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"
        return f"{text}, a tie (visible from {self.visible:.2g})" if self.tied else text


@checked
def compare(left: Values, right: Values, *, confidence: float = CONFIDENCE, method: Method = "t") -> Difference:
    """The paired difference left - right.

    "t": m +- t_(1 - a/2) s / sqrt(n). "bootstrap": the quantiles a/2 and 1 - a/2 of the means of differences drawn with
    replacement, from one fixed stream of random numbers. With fewer than ten seeds these intervals are too short; t is the one to
    report.

    Args:
        left, right: finite values by seed. Seeds of one of them alone do not count.

    Raises:
        ValueError: fewer than two seeds of both, or a value that is not finite.
    """
    check_number("confidence", confidence, above=0, below=1)
    check_choice("method", method, ("t", "bootstrap"))
    differences = _differences(left, right)
    low, high, p = (_t_interval if method == "t" else _bootstrap_interval)(differences, confidence)
    return Difference(
        mean=float(differences.mean()), low=low, high=high, confidence=confidence, p=p, seeds=len(differences),
        deviation=_deviation(differences),
    )  # fmt: skip


@checked
def compare_family(
    pairs: Mapping[Name, tuple[Values, Values]], *, confidence: float = CONFIDENCE, method: Method = "t"
) -> dict[Name, Difference]:
    """The differences of all comparisons that one statement makes, so that it is wrong about any of them with probability a.

    Holm's method: the k-th smallest of M probabilities must be below a / (M - k + 1), as all smaller ones are below theirs. The
    interval of a comparison has the confidence at which it was decided, so that it holds zero where Holm's method finds a tie.
    So the decisions hold together with the given confidence; the intervals, of which decided ones are shorter than Bonferroni's,
    need not all hold their differences together.

    Args:
        pairs: of each comparison by name, left and right as for `compare`.
    """
    single = {name: compare(*pair, confidence=confidence, method=method) for name, pair in pairs.items()}
    order = sorted(single, key=lambda name: single[name].p)
    adjusted = dict(zip(order, adjust_holm([single[name].p for name in order])))
    decided = [name for name in order if adjusted[name] <= 1 - confidence]
    found = {}
    for place, name in enumerate(order):
        tests = len(order) - min(place, len(decided))
        own = compare(*pairs[name], confidence=1 - (1 - confidence) / tests, method=method)
        found[name] = Difference(**{**vars(own), "p": adjusted[name]})
    return {name: found[name] for name in pairs}


def compare_with_one(values: Mapping[Name, Values], one: Name) -> dict[Name, Difference]:
    """The differences from one of several, of all others that share two seeds with it, as one family; {} without the one."""
    reference = values.get(one, {})
    return compare_family(
        {
            name: (own, reference)
            for name, own in values.items()
            if name != one and len(own.keys() & reference.keys()) > 1
        }
    )


def adjust_holm(probabilities: list[float]) -> list[float]:
    """Holm's adjusted probabilities, in the order of the given ones: the k-th smallest of M times M - k + 1, at least those
    before it and at most 1 (Holm 1979)."""
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    adjusted, largest = [0.0] * len(order), 0.0
    for place, one in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * probabilities[one]))
        adjusted[one] = largest
    return adjusted


@checked
def smallest_visible(deviation: float, seeds: int, *, confidence: float = CONFIDENCE, power: float = POWER) -> float:
    """The difference D that a paired t test of n seeds finds with probability `power`.

    D = delta s / sqrt(n), with the delta for which the noncentral t of n - 1 degrees of freedom exceeds t_(1 - a/2) with that
    probability. Its other tail is left out, which adds less than a thousandth.
    """
    if deviation == 0:
        return 0.0
    return _visible_delta(seeds, confidence, power) * deviation / math.sqrt(seeds)


@lru_cache(maxsize=4096)  # most comparisons of a family have one confidence
def _visible_delta(seeds: int, confidence: float, power: float) -> float:
    edge = stats.t.ppf((1 + confidence) / 2, seeds - 1)
    return float(optimize.brentq(lambda delta: stats.nct.sf(edge, seeds - 1, delta) - power, 0.0, 1.0 + 10 * edge))


def _differences(left: Values, right: Values) -> np.ndarray:
    seeds = [seed for seed in left if seed in right]
    if len(seeds) < 2:
        raise ValueError(
            f"left and right must share at least two seeds, got {len(seeds)}: one seed tells nothing of a difference; train more"
        )
    differences = np.array([left[seed] - right[seed] for seed in seeds])
    if not np.isfinite(differences).all():
        raise ValueError(f"left and right must be finite, got the differences {differences.tolist()}")
    return differences


def _deviation(differences: np.ndarray) -> float:
    """s; zero where it is no more than rounding, as of equal differences."""
    s = float(differences.std(ddof=1))
    return s if s > 1e-12 * float(np.abs(differences).max()) else 0.0


def _t_interval(differences: np.ndarray, confidence: float) -> tuple[float, float, float]:
    n, m, s = len(differences), float(differences.mean()), _deviation(differences)
    if s == 0:
        return m, m, float(m == 0)
    error = s / math.sqrt(n)
    half = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * error
    return m - half, m + half, float(2 * special.stdtr(n - 1, -abs(m) / error))


def _bootstrap_interval(differences: np.ndarray, confidence: float) -> tuple[float, float, float]:
    if _deviation(differences) == 0:
        return _t_interval(differences, confidence)
    found = stats.bootstrap(
        (differences,), np.mean, confidence_level=confidence, n_resamples=RESAMPLES, method="percentile",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    means = found.bootstrap_distribution
    tail = min((means <= 0).mean(), (means >= 0).mean())
    return float(found.confidence_interval.low), float(found.confidence_interval.high), float(min(1.0, 2 * tail))
