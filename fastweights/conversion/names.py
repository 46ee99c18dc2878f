"""What the conversions from other architectures share: names of parameters, token ids, settings that must not differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["check_settings", "rename", "token_ids"]


def rename(name: str, patterns: Mapping[str, str]) -> str:
    """The name after all replacements of regular expressions, in their order."""
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


def token_ids(source: Any) -> dict[str, Any]:
    """The special tokens of a configuration, as keywords of ours."""
    return {name: getattr(source, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


def check_settings(architecture: str, **settings: tuple[Any, Any]) -> None:
    """ValueError unless each setting, by name (what it is, what it must be), is what it must be."""
    for name, (found, wanted) in settings.items():
        if found != wanted:
            raise ValueError(f"{architecture} with {name}={found!r} cannot be carried over: it must be {wanted!r}")
