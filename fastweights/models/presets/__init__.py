"""The papers' models by name: one JSON file each, with what the paper says of it and the configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ...checks import check_text, closest, describe_value
from ...kinds import checked
from ...layers import MixerChoice
from ..configuration import FastWeightsConfig

__all__ = ["PRESETS", "Preset", "preset", "with_mixer"]

# Fields of a configuration that say where a hybrid has softmax attention.
LAYOUT = ("softmax_layers", "softmax_options")


@checked
@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model of a paper.

    Attributes:
        source: paper and section.
        size: number of parameters as the paper states it, None where it does not.
        difference: why the count of parameters differs from `size` by more than 2%, "" where it does not.
        note: settings that the paper leaves open or contradicts, and our choice.
        config: arguments of `FastWeightsConfig`.
    """

    source: str
    size: str | None
    difference: str = ""
    note: str
    config: dict[str, Any]


PRESETS: dict[str, Preset] = {
    file.name.removesuffix(".json"): Preset(**json.loads(file.read_text("utf-8")))
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    if file.name.endswith(".json")
}


@checked
def preset(name: str, **changes: Any) -> FastWeightsConfig:
    """The configuration called `name`, with `changes` (another vocabulary, for example) over the file's values.

    A `mixer` among the changes is that of all layers, or lists one per layer: the layers of softmax attention of a hybrid go too,
    unless they are given.

    Raises:
        ValueError: an unknown name (the message gives the nearest and all valid ones), or changes that do not fit.
    """
    values = _read(name)
    kept = {key: value for key, value in values.items() if key not in LAYOUT or "mixer" not in changes}
    return FastWeightsConfig(**{**kept, **changes})


@checked
def with_mixer(name: str, choice: MixerChoice) -> dict[str, Any]:
    """Changes that give the preset called `name` the mixer of the choice. Options of the preset's mixer hold under those of the
    choice (`MixerChoice.in_place_of`), and the layers of softmax attention of a hybrid stay.

    Raises:
        ValueError: an unknown name.
    """
    values = _read(name)
    layout = {key: values[key] for key in LAYOUT if key in values}
    return {**layout, "mixer": choice.in_place_of(values["mixer"])}


def _read(name: str) -> dict[str, Any]:
    """The arguments of `FastWeightsConfig` in the file called `name`."""
    check_text("name", name, what="the name of a preset")
    if name not in PRESETS:
        raise ValueError(
            f"unknown preset {describe_value(name)}{closest(name, PRESETS)}; choose from {', '.join(PRESETS)}"
        )
    return PRESETS[name].config
