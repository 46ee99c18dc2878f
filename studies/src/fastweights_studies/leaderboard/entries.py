"""The rows of one mixer in one column, gathered: what a cell of a table shows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastweights.layers import MixerChoice
from fastweights.layers.choice import format_value

from ..record import Origin, Plain, Row

__all__ = ["EXACT", "Entry", "columns_of", "describe_label", "label_of"]

EXACT = "exact_error"  # the measure of rows with the error of the task's best predictor


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A mixer in a column.

    Attributes:
        column: its title.
        mixer: a key of `MIXERS`, or the name of a rule. label: what tables show, another one for a mixer with options.
        detail: what tables show behind the label: the context at which a growing state was measured.
        seeds, values: the seeds with a finite number, and these numbers, in one order.
        rows: all of them, those of other measures too.
    """

    column: str
    mixer: str
    label: str
    detail: str = ""
    seeds: tuple[int | None, ...]
    values: tuple[float, ...]
    rows: tuple[Row, ...]

    @property
    def run(self) -> Mapping[str, Plain]:
        """What the rows say about the trained models: parameters, state, learning rate. Of the first seed."""
        return self.rows[0].run

    @property
    def learning_rate(self) -> float | None:
        """The chosen one; None where all trainings diverged."""
        rate = self.run["learning_rate"]
        return rate if isinstance(rate, float) else None

    def count(self, name: str) -> int:
        """A whole number of `run`, such as the parameters of the model."""
        number = self.run[name]
        assert isinstance(number, int)
        return number

    @property
    def by_seed(self) -> dict[int, float]:
        """The values by their seeds."""
        return {seed: value for seed, value in zip(self.seeds, self.values) if seed is not None}

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def diverged(self) -> int:
        """How many trainings diverged, those at other learning rates too."""
        of_seed = {row.seed: row.run.get("diverged") for row in self.rows}
        return sum(count for count in of_seed.values() if isinstance(count, int))

    @property
    def undertrained(self) -> bool:
        """Whether the loss of a training was still falling at its end."""
        return any(row.run.get("undertrained") for row in self.rows)

    @property
    def origins(self) -> list[Origin]:
        """Where and when the seeds were measured, each once."""
        found: list[Origin] = []
        for row in self.rows:
            if row.origin not in found:
                found.append(row.origin)
        return found

    def of(self, measure: str) -> list[float]:
        """The finite values of another measure."""
        return [row.value for row in self.rows if row.measure == measure and row.value is not None]


def columns_of(entries: Iterable[Entry]) -> list[str]:
    """The titles of the columns in the order in which they first appear."""
    return list(dict.fromkeys(entry.column for entry in entries))


def describe_label(choice: MixerChoice) -> dict[str, Plain]:
    """What the `run` of a row says about a choice, beside its name and options: its label where these do not make it."""
    return {} if choice.label == _usual_label(choice.name, choice.options) else {"label": choice.label}


def label_of(row: Row) -> str:
    """The label of the mixer of a row. It need not be registered here."""
    label = row.run.get("label")
    return label if isinstance(label, str) else _usual_label(str(row.mixer), row.options)


def _usual_label(mixer: str, options: Mapping[str, Any]) -> str:
    """That of a `MixerChoice` that is given none."""
    written = ",".join(f"{name}={format_value(value)}" for name, value in options.items())
    return f"{mixer}:{written}" if written else mixer
