"""The plan of a conversion: the conversion of every layer, and the options of its new mixer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..checks import closest, describe_value
from ..kinds import checked
from ..layers import MIXERS
from ..models import FastWeightsConfig
from .table import CONVERSIONS, Conversion

__all__ = ["condition", "conversions_between", "converted_config"]


def converted_config(config: FastWeightsConfig, to: str, options: Mapping[str, Any]) -> FastWeightsConfig:
    """The configuration with every layer that continues as `to` changed into it, and the others as they were.

    Raises:
        ValueError: no layer continues as `to`, or an option cannot be carried over.
    """
    if "name" in options:
        raise ValueError(f"{to} has no option 'name'; the mixer is named by `to`")
    layers = config.mixers()
    found = [_find_conversion(name, own, to) for name, own in layers]
    if not any(found):
        raise ValueError(_explain_none([name for name, _ in layers], to))
    entries: list[Any] = []
    for index, ((name, own), conversion) in enumerate(zip(layers, found, strict=True)):
        new = own
        if conversion is not None:
            try:
                new = {**_carry_options(conversion, own), **conversion.options, **options}
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from None
            name = to
        entries.append({"name": name, **new} if new else name)
    same = all(entry == entries[0] for entry in entries)
    changed = config.to_dict()
    for key in ("mixer", "architectures", "transformers_version", "dtype"):
        changed.pop(key, None)
    unknown = {key: changed.pop(key) for key in FastWeightsConfig.unknown_keys(list(changed))}
    converted = FastWeightsConfig(**changed, mixer=entries[0] if same else entries)
    converted.update(unknown)
    return converted


def conversions_between(before: FastWeightsConfig, after: FastWeightsConfig) -> dict[int, Conversion]:
    """The conversion of every layer that was converted, by index."""
    conversions = {}
    for index, (old, new) in enumerate(zip(before.mixers(), after.mixers(), strict=True)):
        conversion = CONVERSIONS.get((old[0], new[0]))
        if conversion is not None and (old != new or not conversion.new):
            conversions[index] = conversion
    return conversions


@checked
def condition(conversion: Conversion) -> str:
    """The options that a source needs and that its mixer has not by default, such as "decay='head'"; empty where there are
    none."""
    usual = _list_options(conversion.source)
    needed = {name: value for name, value in conversion.requires.items() if usual[name] != value}
    return " and ".join(f"{name}={value!r}" for name, value in needed.items())


def _find_conversion(name: str, options: Mapping[str, Any], to: str) -> Conversion | None:
    """The conversion of one layer, None where there is none or where it has what the conversion adds."""
    conversion = CONVERSIONS.get((name, to))
    if conversion is None or name != to:
        return conversion
    present = {**_list_options(name), **options}
    return conversion if all(present[key] == value for key, value in conversion.requires.items()) else None


def _carry_options(conversion: Conversion, options: Mapping[str, Any]) -> dict[str, Any]:
    """The source's options as those of the target, without those that are the target's defaults."""
    defaults = _list_defaults(MIXERS[conversion.source].layer)
    known = _list_options(conversion.target)
    carried = {}
    for option, value in {**_list_options(conversion.source), **options}.items():
        if option in conversion.requires:
            if value != conversion.requires[option]:
                raise ValueError(
                    f"{conversion.source} with {option}={value!r} cannot continue as {conversion.target}: "
                    f"{option} must be {conversion.requires[option]!r}"
                )
        elif option in known:
            if value != known[option]:
                carried[option] = value
        elif value != defaults[option]:
            raise ValueError(
                f"{conversion.source} with {option}={value!r} cannot continue as {conversion.target}, which has no such "
                f"option: {option} must be {defaults[option]!r}"
            )
    return carried


def _list_options(name: str) -> dict[str, Any]:
    """All options of a named mixer and their values."""
    return {**_list_defaults(MIXERS[name].layer), **MIXERS[name].options}


def _list_defaults(layer: type) -> dict[str, Any]:
    parameters = inspect.signature(layer).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _explain_none(names: list[str], to: str) -> str:
    if (to, to) in CONVERSIONS and to in names:
        return (
            f"there is no conversion from {to} to itself but for layers with {condition(CONVERSIONS[to, to])}: these layers have "
            "what it would add"
        )
    targets = [target for _, target in CONVERSIONS]
    hint = "" if to in targets else closest(to, targets)
    pairs = ", ".join(_describe_pair(conversion) for conversion in CONVERSIONS.values())
    have = ", ".join(dict.fromkeys(names))
    return (
        f"to must be a mixer that {have} continues as, and there is no conversion from {have} to {describe_value(to)}{hint}; "
        f"there are {pairs}"
    )


def _describe_pair(conversion: Conversion) -> str:
    needed = condition(conversion)
    return f"{conversion.source}{f' with {needed}' * bool(needed)} -> {conversion.target}"
