"""What a claim is: its place in a paper, how it is measured here, and the rule that decides."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fastweights.checks import check_list, check_path, check_size, check_text, check_whole_number, describe_value
from fastweights.kinds import checked

__all__ = [
    "OWN",
    "PAPERS",
    "SOURCES",
    "STATUSES",
    "Claim",
    "Conditions",
    "Measurement",
    "Status",
    "Unmeasured",
    "Verdict",
    "clear_sign",
    "decided",
    "lost_trainings",
    "not_finite",
    "over_seeds",
    "paired",
]

PAPERS = {
    "pdn": "Preconditioned DeltaNet",
    "gka": "Gated KalmaNet",
    "palimpsa": "Palimpsa",
    "lattice": "Lattice",
    "vla": "Variational Linear Attention",
}
OWN = "own"
SOURCES = {**PAPERS, OWN: "A result of our own"}
Status = Literal["holds", "holds weakly", "does not hold", "not resolved", "not testable here"]
STATUSES: tuple[Status, ...] = get_args(Status)


class Unmeasured(Exception):
    """A measurement needs something that this machine does not have. The message says what, and how to get it."""


@checked
@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a measurement runs with.

    Attributes:
        seeds: of random numbers; the spread over them is reported.
        device: torch device.
        folder: for checkpoints and results of trainings, which continue from there after an interruption.
        measurements: folder of the benchmarks' result files, which claims about speed are read from.
        workers: processes that train at the same time; None for one per core or GPU.

    Raises:
        TypeError: an attribute of a wrong kind.
        ValueError: no seed, one that is negative or there twice, an unknown device, or a number of workers that is not positive.
    """

    seeds: tuple[int, ...]
    device: str = "cpu"
    folder: Path = Path("runs/claims/trained")
    measurements: Path = Path("studies/results")
    workers: int | None = None

    def __post_init__(self) -> None:
        seeds = check_list("seeds", self.seeds, "whole numbers")
        if not seeds or len(set(map(repr, seeds))) < len(seeds):
            raise ValueError(
                f"seeds must be a list of at least one seed, none of them twice, got {describe_value(self.seeds)}"
            )
        for seed in seeds:
            check_whole_number("seeds", seed)
        check_text("device", self.device, what="a torch device")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(
                f"device must be a torch device such as 'cpu' or 'cuda', got {describe_value(self.device)}"
            ) from None
        check_path("folder", self.folder)
        check_path("measurements", self.measurements)
        if self.workers is not None:
            check_size("workers", self.workers)


@checked
@dataclass(frozen=True)
class Measurement:
    """Measured numbers by name, each with one value per seed.

    Attributes:
        values: NaN where a number is not finite.
        origin: the file, machine and date that numbers come from which were measured earlier.
        undertrained: what was still learning at the end of its training.
    """

    values: Mapping[str, list[float]]
    origin: str = ""
    undertrained: tuple[str, ...] = ()

    def mean(self, name: str) -> float:
        return statistics.fmean(self.values[name])

    def largest(self, name: str) -> float:
        """Over the seeds; NaN if one of them is."""
        values = self.values[name]
        return math.nan if any(map(math.isnan, values)) else max(values)

    def smallest(self, name: str) -> float:
        return -self._negative().largest(name)

    def error(self, name: str) -> float:
        """Standard error of the mean over the seeds; NaN with a single seed or where a number is not finite."""
        return standard_error(self.values[name])

    def _negative(self) -> Measurement:
        return Measurement({name: [-x for x in values] for name, values in self.values.items()})


@checked
@dataclass(frozen=True)
class Verdict:
    """What the rule of a claim says of the measured numbers, with the numbers that decided."""

    status: Status
    reason: str


def decided(holds: bool, reason: str, otherwise: Status = "does not hold") -> Verdict:
    return Verdict("holds" if holds else otherwise, reason)


@checked
@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper, or a question of our own.

    Attributes:
        name: C1 to C35, or S1 to S6 for claims about speed; own-1 to own-3 for results of our own, own-2b for a part of
            own-2 with an expectation, a rule and a measurement of its own.
        paper: a key of `SOURCES`. source: the place in it, or what led to the question.
        says: the claim. printed: the paper's numbers.
        setting: what is computed here, with sizes.
        larger: what a GPU computes in another way where its size is larger. Results of the two sizes have a file each.
        expected: the status that was expected before anything was run. forecast: the numbers expected then, and why; "none", or
            "none: " and a reason, where no outcome was expected (`has_forecast`).
        rule: what decides, in words; `decide` computes it.
        measure: computes or reads the numbers. None where something is missing that `needs` names.
        decide: the verdict on the numbers.
        seeds: the default seeds.
        device: where it fits: "cpu", "cuda", or "files" for what the benchmarks have measured.
        cost: time on that device, in words.
        needs: what is missing where it cannot be measured yet.
        note: what a reader must know beside the outcome. It may be written after the run.
        seen: which numbers had been seen before the claim or its rule had its present form, so that `expected` is no forecast of
            the outcome. Empty where it is one.
    """

    name: str
    paper: str
    source: str
    says: str
    printed: str
    setting: str
    expected: Status
    forecast: str
    rule: str
    measure: Callable[[Conditions], Measurement] | None
    decide: Callable[[Measurement], Verdict] | None
    seeds: tuple[int, ...] = (0,)
    device: Literal["cpu", "cuda", "files"] = "cpu"
    cost: str = "seconds"
    needs: str | None = None
    larger: str = ""
    note: str = ""
    seen: str = ""
    declared: tuple[str, ...] = field(
        default=("paper", "source", "says", "printed", "setting", "expected", "forecast", "rule"),
        init=False,
        repr=False,
    )

    @property
    def has_forecast(self) -> bool:
        """Whether an outcome was expected. A forecast of "none", or of "none: " with a reason, is none."""
        return self.forecast.partition(":")[0] != "none"

    @property
    def expectation(self) -> str:
        """The expected status with the numbers, or that none was forecast."""
        if not self.has_forecast:
            return self.forecast.replace("none", "no forecast", 1)
        return f"{self.expected}: {self.forecast}" + (
            f" (no forecast of this outcome: {self.seen})" if self.seen else ""
        )

    def result_name(self, device: str) -> str:
        """The name of the file of a result that a device has measured, without its ending."""
        return f"{self.name}-cuda" if self._is_larger(device) else self.name

    def declaration(self, device: str = "cpu") -> dict[str, Any]:
        """What was written before the run on a device, as a result repeats it."""
        return {name: getattr(self, name) for name in (*self.declared, *("larger",) * self._is_larger(device))}

    def _is_larger(self, device: str) -> bool:
        return bool(self.larger) and device.partition(":")[0] == "cuda"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; NaN for a single value or where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def lost_trainings(found: Measurement, labels: Iterable[str]) -> list[str]:
    """The labels with a training whose loss did not stay finite."""
    return [label for label in labels if any(map(math.isnan, found.values[label]))]


def not_finite(lost: Sequence[str]) -> Verdict:
    """What a claim comes to that needs trainings which were lost."""
    return Verdict("not resolved", f"the loss did not stay finite: {', '.join(lost)}")


def paired(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Mean of left - right over the seeds that both share, and its standard error."""
    differences = [x - y for x, y in zip(left, right, strict=True)]
    return statistics.fmean(differences), standard_error(differences)


def clear_sign(difference: float, error: float, errors: float = 2.0) -> int:
    """1 or -1 where a difference exceeds this many standard errors; 0 for a tie, and where the error is NaN."""
    return int(difference > errors * error) - int(difference < -errors * error)


def over_seeds(measure: Callable[[int, str], Mapping[str, float]]) -> Callable[[Conditions], Measurement]:
    """Measures once per seed with `measure(seed, device)`."""

    def measure_all(conditions: Conditions) -> Measurement:
        rows = [measure(seed, conditions.device) for seed in conditions.seeds]
        return Measurement({name: [float(row[name]) for row in rows] for name in rows[0]})

    return measure_all
