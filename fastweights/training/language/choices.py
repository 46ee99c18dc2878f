"""A preset as a run file chooses it: its name, a label and changes to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checks import check_text, error_prefix
from ...layers.choice import check_label
from ...models import preset

__all__ = ["split_preset"]


def split_preset(entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The label of an entry of `LanguageRun.presets`, and the `model` that it stands for.

    Raises:
        ValueError: no name, one that no preset has (the message gives the nearest), or changes that do not fit.
    """
    changes = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    if "name" not in changes:
        raise ValueError("a table of presets must have the key 'name'; add it")
    name, label = changes.pop("name"), changes.pop("label", "")
    with error_prefix("presets"):
        preset(name, **changes)
        return check_label(check_text("label", label) or name), {"preset": name, **changes}
