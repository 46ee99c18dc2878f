"""The mixers of a comparison: name, options and the label that tables and plots show. Also what the options of a mixer mean."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..checks import check_text, closest, describe_value
from ..kernels.availability import why_unavailable
from ..kinds import checked
from .mixer import Mixer
from .registry import MIXERS, MixerSpec, mixer_spec

__all__ = [
    "MixerChoice",
    "check_backend",
    "check_label",
    "described_options",
    "option_value",
    "parse_mixers",
    "split_entry",
]

LONGEST_LABEL = 100
SIZES = ("hidden_size", "num_heads")  # every mixer has them, from the model
COMMA = re.compile(r",(?![^\[]*\])")  # one that separates: not between brackets


@dataclass(frozen=True)
class MixerChoice:
    """One mixer of a comparison. Two choices may have the same name and other options.

    Attributes:
        name: a key of `fastweights.layers.MIXERS`.
        options: options of the layer, over those that belong to the name; "none" is None where the option may be None.
        label: what tables, plots and result files show; NAME:OPTION=VALUE,... when "".

    Raises:
        ValueError: an unknown mixer or option (the message names the nearest), or a label that cannot be shown.
        TypeError: an argument of a wrong kind.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise TypeError(
                f"options of mixer {self.name!r} must be a table (in Python a dict) of values by their names, got "
                f"{describe_value(self.options)}"
            )
        mixer_spec(self.name, self.options)
        try:
            options = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"options of mixer {self.name!r} must be values that JSON can hold, but {error}; replace that value"
            ) from None
        object.__setattr__(self, "options", _replace_none(self.name, options))
        label = check_label(check_text("label", self.label) or self._text())
        object.__setattr__(self, "label", label)

    def _text(self) -> str:
        options = ",".join(f"{name}={format_value(value)}" for name, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @classmethod
    def of(cls, given: object) -> MixerChoice:
        """The choice that is given as a `MixerChoice`, as a text of `parse_mixers`, or as a table with name, options and label.

        Raises:
            ValueError, TypeError: as for a new choice; a text of several, or a table with other keys.
        """
        if isinstance(given, MixerChoice):
            return given
        if isinstance(given, Mapping):
            known = [field.name for field in fields(cls)]
            for key in given:
                if key not in known:
                    raise ValueError(
                        f"mixer as a table has no key {describe_value(key)}{closest(key, known)}; it has {', '.join(known)}"
                    )
            if "name" not in given:
                raise ValueError("mixer as a table must have the key 'name'; add it")
            return cls(**given)
        choices = parse_mixers(check_text("mixer", given, what="the name of a mixer"))
        if len(choices) != 1:
            raise ValueError(
                f"a mixer must be one NAME[:OPTION=VALUE,...][@LABEL], got {given!r}; list them one by one"
            )
        return choices[0]

    @property
    def entry(self) -> str | dict[str, Any]:
        """The choice as the `mixer` of a `FastWeightsConfig`."""
        return {"name": self.name, **self.options} if self.options else self.name

    @property
    def short(self) -> str | MixerChoice:
        """The name alone where the choice has neither options nor a label of its own; otherwise the choice."""
        return self if self.options or self.label != self.name else self.name

    def record(self) -> str | dict[str, Any]:
        """The choice in a result file: the name alone where it has neither options nor a label of its own."""
        if self.short is not self:
            return self.name
        return {"name": self.name, "options": dict(self.options), "label": self.label}

    def in_place_of(self, entry: str | Mapping[str, Any]) -> str | dict[str, Any]:
        """The choice as the `mixer` of a configuration that had `entry`.

        Options of `entry` are kept where the choice does not set them. Where both name one mixer, all of them are. Otherwise
        only those are that mean the same in both layers, because both inherit them from one class of options, and that do not
        define the chosen mixer.
        """
        name, options = split_entry(entry)
        if name != self.name:
            theirs, ours = (getattr(MIXERS[one].layer, "Options", None) for one in (name, self.name))
            options = {
                key: value
                for key, value in options.items()
                if key not in MIXERS[self.name].options and _declaring(theirs, key) is _declaring(ours, key) is not None
            }
        return MixerChoice(self.name, {**options, **self.options}).entry


def check_label(label: str) -> str:
    """The label of a model of a comparison; ValueError where it cannot be shown in a line."""
    if label != label.strip() or not label.isprintable() or len(label) > LONGEST_LABEL:
        raise ValueError(
            f"label of a mixer must be one line of at most {LONGEST_LABEL} characters without spaces around it, got "
            f"{describe_value(label)}; choose another, NAME:OPTION=VALUE@LABEL in a command"
        )
    return label


def _declaring(kind: type | None, name: str) -> type | None:
    """The class that declares the option `name` of the options class `kind`; None where it has no such option."""
    classes = () if kind is None else reversed(kind.__mro__)
    return next((one for one in classes if name in getattr(one, "__dataclass_fields__", ())), None)


def split_entry(entry: object, what: str = "a mixer") -> tuple[str, dict[str, Any]]:
    """Name and options of an entry of `FastWeightsConfig.mixer`; TypeError for anything else. what: what messages call the
    entry."""
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a name or {{'name': ..., option: ...}}, got {describe_value(entry)}")
    return name, options


@checked
def parse_mixers(text: str) -> tuple[MixerChoice, ...]:
    """The choices that a text names: `NAME[:OPTION=VALUE[,OPTION=VALUE...]][@LABEL]`, separated by commas.

    Every OPTION=VALUE after a colon belongs to that mixer. The next mixer begins at a part without "=", or with a colon before
    it. Values are JSON, otherwise strings. Commas may stand inside brackets only. Without a label the text itself is the label.

        gdn,gdn:conv_size=2,expand_v=2@small,palimpsa-d:b_scale=[0.1,1.0]

    Raises:
        ValueError: a text that does not follow this grammar, an unknown mixer or an unknown option.
    """
    choices: list[list[str]] = []
    for part in (part.strip() for part in COMMA.split(text)):
        before, equals, _ = part.partition("=")
        if not equals or ":" in before or "@" in before:
            choices.append([part])
        elif choices and ":" in choices[-1][0] and "@" not in choices[-1][-1]:
            choices[-1].append(part)
        else:
            where = choices[-1][0] if choices else "NAME"
            raise ValueError(
                f"option {part!r} belongs to no mixer; options follow a colon and come before the label, as in "
                f"{where.partition('@')[0]}:{part}@LABEL"
            )
    return tuple(_choice(",".join(parts)) for parts in choices)


def _replace_none(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with None in place of "none" where an option may be None, because TOML has no null."""
    kind = getattr(mixer_spec(name, {}).layer, "Options", None)
    if kind is None:
        return options
    optional = {field.name for field in fields(kind) if "None" in str(field.type)}
    return {key: None if value == "none" and key in optional else value for key, value in options.items()}


def option_value(text: str) -> Any:
    """The value of an option as users type it: JSON, otherwise a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _choice(text: str) -> MixerChoice:
    body, at, label = text.rpartition("@") if "@" in text else (text, "", "")
    if at and not label:
        raise ValueError(f"the label after @ must not be empty, got {text!r}")
    name, colon, rest = body.partition(":")
    mixer_spec(name, {})
    options: dict[str, Any] = {}
    for part in COMMA.split(rest) if colon else ():
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not (option and equals and value):
            raise ValueError(f"options of a mixer must be NAME=VALUE, such as {name}:conv_size=2, got {part!r}")
        if option in options:
            raise ValueError(f"option {option!r} is there twice in {body!r}; give it once")
        options[option] = option_value(value)
    return MixerChoice(name, options, label or body)


def format_value(value: object) -> str:
    """The text that users type for an option's value, where there is one."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, default=repr)


def check_backend(name: str, options: Mapping[str, Any], device: str) -> None:
    """ValueError where the mixer `name` with these options needs kernels that cannot run on the device."""
    backend = {**MIXERS[name].options, **options}.get("backend")
    reason = why_unavailable(torch.float32, torch.device(device)) if backend == "triton" else None
    if reason is not None:
        raise ValueError(f"mixer {name!r}: backend 'triton' {reason}; use 'torch' or 'auto'")


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
    """The options of a mixer with their defaults. Those that belong to its name replace the layer's."""
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
    """The lines of all Args sections by option. A class replaces the lines of the classes that it extends."""
    classes = [*layer.__mro__, *getattr(layer, "Options", Mixer).__mro__]
    return {name: text for one in reversed(classes) for name, text in _arguments(vars(one).get("__doc__") or "")}


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Name and text of every entry under "Args:"."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", inspect.cleandoc(docstring), re.MULTILINE)
    for entry in re.split(r"\n(?=    \w)", section[1]) if section else ():
        names, _, text = entry.strip().partition(":")
        for name in names.split(","):
            yield name.strip(), " ".join(text.split())
