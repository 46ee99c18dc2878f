"""How the loops over tokens lay a chunk out: tokens first, vectors as rows. A product of a row with a matrix is the fast one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def to_rows(x: Tensor) -> Tensor:
    """[G, C, n] -> [C, G, 1, n], a copy."""
    return x.transpose(0, 1)[:, :, None].clone(memory_format=torch.contiguous_format)


def from_rows(x: Tensor) -> Tensor:
    """[C, G, 1, n] -> [G, C, n]"""
    return x[:, :, 0].transpose(0, 1)


def optional_rows(x: Tensor | None, count: int) -> list[None] | Tensor:
    """One row per token, or None for each token."""
    return [None] * count if x is None else to_rows(x)


def backwards(*xs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tokens' parts, last token first."""
    return zip(*(x.unbind(0)[::-1] for x in xs))
