"""Check of what every layer's forward takes, beside the checks of the whole library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..checks import check_choice, check_flag, check_number, check_positive, check_size, closest
from ..ops.framework.sequences import check_cu_seqlens

if TYPE_CHECKING:
    from .cache import LayerCache

__all__ = ["check_choice", "check_flag", "check_input", "check_number", "check_positive", "check_size", "closest"]


def check_input(x_BTD: object, hidden_size: int, cache: LayerCache | None, cu_seqlens: Tensor | None) -> None:
    """The arguments that every layer's forward takes."""
    if not isinstance(x_BTD, Tensor):
        raise TypeError(f"x must be a tensor [batch, time >= 1, {hidden_size}], got {type(x_BTD).__name__}")
    if x_BTD.ndim != 3 or x_BTD.shape[2] != hidden_size or x_BTD.shape[1] < 1:
        raise ValueError(f"x must be a tensor [batch, time >= 1, {hidden_size}], got {list(x_BTD.shape)}")
    count = check_cu_seqlens(cu_seqlens, x_BTD.shape[0], x_BTD.shape[1]).count
    if cache is not None and cache.count not in (None, count):
        raise ValueError(
            f"cache must hold as many sequences as the input, {count}, got {cache.count}; "
            "start an empty cache for other sequences"
        )
