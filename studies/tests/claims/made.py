"""Numbers of claims that tests make up or change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fastweights_studies.claims import Measurement, Number

from fastweights.layers import MixerChoice

__all__ = ["change_values", "make_numbers", "take_first_seed"]


def make_numbers(
    measure: str, values: Sequence[float], mixer: str | MixerChoice | None = None, **column: Any
) -> list[Number]:
    """One number, with a value per seed from 0 on."""
    fields: dict[str, Any] = {"mixer": mixer}
    if isinstance(mixer, MixerChoice):
        fields = {"mixer": mixer.name, "options": mixer.options}
    return [Number(measure, value, column, **fields, seed=seed) for seed, value in enumerate(values)]


def change_values(
    found: Measurement, values: Sequence[float], measure: str, *mixer: str | MixerChoice, **fields: Any
) -> Measurement:
    """The measurement with other values of the numbers that these fields select, as `Measurement.select` does."""
    groups: Iterable[Sequence[Number]] = found.by_number()
    changed = found.select(measure, *mixer, **fields)
    assert changed
    return Measurement(
        tuple(
            replace(number, value=value)
            for group in groups
            for number, value in zip(group, values if group[0] in changed else [one.value for one in group])
        )
    )


def take_first_seed(found: Measurement) -> Measurement:
    return Measurement(tuple(group[0] for group in found.by_number()))
