"""The measured numbers of a claim, each with the fields that say which number it is, and how claims look them up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fastweights.kinds import checked
from fastweights.layers import MixerChoice

from ..record import Origin, Plain, Row
from .conditions import Conditions

__all__ = [
    "UNDERTRAINED",
    "Column",
    "Measurement",
    "Number",
    "mark_undertrained",
    "measure_by_seed",
    "numbers_of_mixer",
    "standard_error",
]

Column: TypeAlias = Mapping[str, Plain]  # parameters by name
UNDERTRAINED = "undertrained"  # the measure of a number that marks trainings which were still learning at their end


@checked
@dataclass(frozen=True)
class Number:
    """One measured number of a claim. `run_claim` makes a `Row` of it, with the task and the unit of the claim.

    Attributes:
        measure: what was measured, one of `Claim.numbers`.
        value: NaN where it is not finite.
        column, mixer, options, run, seed: as of `Row`.
        origin: of a number that was measured earlier; None for one of this run.
    """

    measure: str
    value: float
    column: Column = field(default_factory=dict)
    mixer: str | None = None
    options: Column = field(default_factory=dict)
    run: Column = field(default_factory=dict)
    seed: int | None = None
    origin: Origin | None = None

    @property
    def subject(self) -> tuple[object, ...]:
        """What it is a number of: mixer, options and column. Equal for its numbers by seed and by measure."""
        return self.mixer, *(tuple(sorted(fields.items())) for fields in (self.options, self.column))

    def is_of(self, mixer: str | MixerChoice) -> bool:
        """Whether it is of a mixer: one of a name with any options, or the one of a choice."""
        if isinstance(mixer, MixerChoice):
            return (self.mixer, dict(self.options)) == (mixer.name, dict(mixer.options))
        return self.mixer == mixer

    def as_row(self, task: str, unit: str, origin: Origin) -> Row:
        return Row(
            task=task,
            measure=self.measure,
            unit=unit,
            column=self.column,
            mixer=self.mixer,
            options=self.options,
            run=self.run,
            seed=self.seed,
            value=float(self.value) if math.isfinite(self.value) else None,
            origin=self.origin or origin,
        )

    @classmethod
    def from_row(cls, row: Row) -> Number:
        value = math.nan if row.value is None else row.value
        return cls(row.measure, value, row.column, row.mixer, row.options, row.run, row.seed, row.origin)


@checked
@dataclass(frozen=True)
class Measurement:
    """The measured numbers of a claim, selected by measure, mixer, options and parameters of the column."""

    numbers: tuple[Number, ...] = ()

    def select(
        self, measure: str, mixer: str | MixerChoice | None = None, *, options: Column | None = None, **column: Any
    ) -> list[Number]:
        """The numbers whose fields are these, in order. Fields that are left out may have any value.

        Args:
            mixer: a name stands for the mixer with any options, a `MixerChoice` for one with exactly its options.
        """
        return [
            number
            for number in self.numbers
            if number.measure == measure
            and (mixer is None or number.is_of(mixer))
            and all(number.options.get(name) == value for name, value in (options or {}).items())
            and all(name in number.column and number.column[name] == value for name, value in column.items())
        ]

    def values(self, measure: str, mixer: str | MixerChoice | None = None, **fields: Any) -> list[float]:
        """The values of one number by seed; arguments as of `select`.

        Raises:
            KeyError: the fields select no number, or numbers of several columns or mixers.
        """
        found = self.select(measure, mixer, **fields)
        if len({number.subject for number in found}) != 1:
            asked = ", ".join(
                f"{name} {value}" for name, value in {"mixer": mixer, **fields}.items() if value is not None
            )
            raise KeyError(f"{'one' if found else 'a'} number of {measure} with {asked}")
        return [number.value for number in found]

    def by_seed(self, measure: str, mixer: str | MixerChoice | None = None, **fields: Any) -> dict[int, float]:
        """`values` by their seeds."""
        self.values(measure, mixer, **fields)
        return {number.seed or 0: number.value for number in self.select(measure, mixer, **fields)}

    def mean(self, measure: str, mixer: str | MixerChoice | None = None, **fields: Any) -> float:
        """Over the seeds of one number; arguments as of `select`."""
        return statistics.fmean(self.values(measure, mixer, **fields))

    def error(self, measure: str, mixer: str | MixerChoice | None = None, **fields: Any) -> float:
        """Standard error of the mean over the seeds; NaN with a single seed or where a number is not finite."""
        return standard_error(self.values(measure, mixer, **fields))

    def largest(self, measure: str, mixer: str | MixerChoice | None = None, **fields: Any) -> float:
        """Of all selected numbers; NaN if one of them is. Arguments as of `select`.

        Raises:
            KeyError: the fields select no number.
        """
        values = [number.value for number in self.select(measure, mixer, **fields)]
        if not values:
            raise KeyError(f"a number of {measure}")
        return math.nan if any(map(math.isnan, values)) else max(values)

    def smallest(self, measure: str, mixer: str | MixerChoice | None = None, **fields: Any) -> float:
        """As `largest`."""
        opposite = [replace(number, value=-number.value) for number in self.select(measure, mixer, **fields)]
        return -Measurement(tuple(opposite)).largest(measure)

    def by_number(self) -> list[list[Number]]:
        """The numbers in groups that differ by seed alone, in order."""
        groups: dict[tuple[object, ...], list[Number]] = {}
        for number in self.numbers:
            groups.setdefault((number.measure, number.subject), []).append(number)
        return list(groups.values())


def mark_undertrained(column: Column, **fields: Any) -> Number:
    """The mark of trainings of which one was still learning at its end. fields: of `Number`."""
    return Number(UNDERTRAINED, 1.0, column, **fields)


def numbers_of_mixer(numbers: Iterable[Number], mixer: str, **column: Plain) -> list[Number]:
    """Numbers that were measured of a mixer, where what measured them knows neither its name nor these parameters."""
    return [replace(number, mixer=mixer, column={**column, **number.column}) for number in numbers]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; NaN for a single value or where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def measure_by_seed(measure: Callable[[int, str], Iterable[Number]]) -> Callable[[Conditions], Measurement]:
    """Measures once per seed with `measure(seed, device)`."""

    def measure_all(conditions: Conditions) -> Measurement:
        return Measurement(
            tuple(
                replace(number, seed=seed) for seed in conditions.seeds for number in measure(seed, conditions.device)
            )
        )

    return measure_all
