"""What a mixer's options mean: their defaults, and their lines in the docstrings of the layer and of its options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .choice import format_value
from .mixer import Mixer
from .registry import MixerSpec

__all__ = ["DescribedOption", "described_options"]

SIZES = ("hidden_size", "num_heads")  # every mixer has them, from the model


@dataclass(frozen=True)
class DescribedOption:
    """An option as lists show it.

    Attributes:
        name: of the option.
        default: as a command takes it; "" where it must be given.
        meaning: its line in a docstring; "" without one.
    """

    name: str
    default: str
    meaning: str


def described_options(spec: MixerSpec) -> list[DescribedOption]:
    """The options of a mixer, those of its name over the layer's own defaults."""
    meanings = _meanings(spec.layer)
    found = []
    for name, parameter in inspect.signature(spec.layer).parameters.items():
        if name in SIZES or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = spec.options.get(name, parameter.default)
        shown = "" if default is parameter.empty else format_value(default)
        found.append(DescribedOption(name, shown, meanings.get(name, "")))
    return found


def _meanings(layer: type[Mixer]) -> dict[str, str]:
    """The lines of all Args sections; those of a class come over those of the classes that it extends."""
    classes = [*layer.__mro__, *getattr(layer, "Options", Mixer).__mro__]
    return {name: text for one in reversed(classes) for name, text in _arguments(vars(one).get("__doc__") or "")}


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Name and text of every entry under "Args:"."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", inspect.cleandoc(docstring), re.MULTILINE)
    for entry in re.split(r"\n(?=    \w)", section[1]) if section else ():
        names, _, text = entry.strip().partition(":")
        for name in names.split(","):
            yield name.strip(), " ".join(text.split())
