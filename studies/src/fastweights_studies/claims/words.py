"""The words for the numbers of a claim, made from their fields: tables, pages and verdicts name every number by these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from fastweights.kinds import checked
from fastweights.layers import MixerChoice

from .measurement import Number

__all__ = ["Quantity", "Words"]


@checked
@dataclass(frozen=True)
class Quantity:
    """What a claim measures.

    Attributes:
        words: a template that names a number, with names of its fields and "{subject}", which is that of `Words`:
            "largest norm, d = {channels}".
        unit: of the values.
    """

    words: str
    unit: str = "1"


@checked
@dataclass(frozen=True, kw_only=True)
class Words:
    """How the numbers of a claim are named.

    Attributes:
        subject: a template for what a number is a number of, with names of its fields: "{mixer}, {pairs} pairs". Parts between
            commas whose fields a number does not have are left out.
        terms: the words for values, by field, where the value itself does not say it; "" leaves it out.
        choices: the mixers whose labels are the words for numbers of them, or of them with more options.
    """

    subject: str = ""
    terms: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    choices: tuple[MixerChoice, ...] = ()

    def name_number(self, quantity: Quantity, number: Number) -> str:
        return quantity.words.format(subject=self.name_subject(number), **self._describe_fields(number))

    def name_subject(self, number: Number) -> str:
        fields = self._describe_fields(number)
        return ", ".join(
            part.format(**fields)
            for part in self.subject.split(", ")
            if all(fields.get(name) not in (None, "") for _, name, *_ in Formatter().parse(part) if name is not None)
        )

    def label_mixer(self, number: Number) -> str:
        """The label of the choice that has most of a number's options; else the term for the mixer, or its name."""
        known = [
            choice
            for choice in self.choices
            if choice.name == number.mixer and choice.options.items() <= number.options.items()
        ]
        if known:
            return max(known, key=lambda choice: len(choice.options)).label
        return self.term("mixer", number.mixer or "")

    def term(self, name: str, value: Any) -> Any:
        """The words for the value of a field, or the value itself."""
        return self.terms.get(name, {}).get(value, value)

    def _describe_fields(self, number: Number) -> dict[str, Any]:
        fields = {name: self.term(name, value) for name, value in number.column.items()}
        return {**fields, "mixer": self.label_mixer(number)}
