"""Checks of what a caller passes to a layer: each failure names the argument, the rule, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.framework.sequences import check_cu_seqlens

if TYPE_CHECKING:
    from .cache import LayerCache

__all__ = ["check_choice", "check_flag", "check_input", "check_number", "check_positive", "check_size", "closest"]


def closest(name: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' for a misspelt name, or nothing when no known name is near."""
    matches = get_close_matches(name, list(known), n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def check_size(name: str, value: object) -> int:
    """A positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return value


def check_number(name: str, value: object) -> float:
    """A finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def check_positive(name: str, value: object) -> float:
    """A positive finite number."""
    number = check_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return number


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_input(x_BTD: object, hidden_size: int, cache: LayerCache | None, cu_seqlens: Tensor | None) -> None:
    """What every layer's forward takes."""
    if not isinstance(x_BTD, Tensor) or x_BTD.ndim != 3 or x_BTD.shape[2] != hidden_size or x_BTD.shape[1] < 1:
        got = list(x_BTD.shape) if isinstance(x_BTD, Tensor) else type(x_BTD).__name__
        raise ValueError(f"x must be a tensor [batch, time >= 1, {hidden_size}], got {got}")
    count = check_cu_seqlens(cu_seqlens, x_BTD.shape[0], x_BTD.shape[1]).count
    if cache is not None and cache.count not in (None, count):
        raise ValueError(
            f"cache must hold as many sequences as the input, {count}, got {cache.count}; "
            "start an empty cache for other sequences"
        )
