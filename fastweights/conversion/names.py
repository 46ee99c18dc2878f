"""What the conversions from other architectures share: names, settings that have one name, settings that must not differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["check_settings", "rename", "shared_settings"]

SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range", "tie_word_embeddings")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def rename(name: str, patterns: Mapping[str, str]) -> str:
    """The name after all replacements of regular expressions, in their order."""
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


def shared_settings(source: Any) -> dict[str, Any]:
    """The settings of a configuration that have the same names here. Special tokens may be missing there."""
    return {name: getattr(source, name) for name in SHARED} | {name: getattr(source, name, None) for name in TOKENS}


def check_settings(architecture: str, **settings: tuple[Any, Any]) -> None:
    """ValueError unless each setting, by name (what it is, what it must be), is what it must be."""
    for name, (found, wanted) in settings.items():
        if found != wanted:
            raise ValueError(f"{architecture} with {name}={found!r} cannot be carried over: it must be {wanted!r}")
