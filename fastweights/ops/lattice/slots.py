"""A slot as direction and length, and how the loops over tokens lay a chunk out.

A slot of zeros has no direction: it answers nothing, is not written and stays zero. Every other slot keeps a direction: a
decay below the resolution of its dtype counts as that resolution, so that a slot which is forgotten and not written at one
token keeps the direction it had, and a slot that is not zero is at least SHORTEST long.

In a chunk the tokens come first, and vectors are rows: a product of a row with a matrix is the fast one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SHORTEST = 1e-6


def direction_and_length(S: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] -> [..., V] of length 1 and the length [..., 1]; both 0, with gradient 0, where there is nothing."""
    square = S.square().sum(-1, keepdim=True)
    inverse = square.masked_fill(square == 0, torch.inf).rsqrt()
    length = square * inverse
    return S * inverse, torch.where(square > 0, length.clamp_min(SHORTEST), length)


def inverse(length: Tensor) -> Tensor:
    """1 / length, 0 where there is none."""
    return length.masked_fill(length == 0, torch.inf).reciprocal()


def clamp_decay(decay: Tensor) -> Tensor:
    """Decay of at least the resolution of its dtype, with the gradient of the decay that was given."""
    smallest = torch.finfo(decay.dtype).eps
    return decay + (smallest - decay).clamp_min(0).detach()


def to_rows(x: Tensor) -> Tensor:
    """[G, C, n] -> [C, G, 1, n], a copy."""
    return x.transpose(0, 1)[:, :, None].clone(memory_format=torch.contiguous_format)


def from_rows(x: Tensor) -> Tensor:
    """[C, G, 1, n] -> [G, C, n]"""
    return x[:, :, 0].transpose(0, 1)


def optional_rows(x: Tensor | None, count: int) -> list[None] | Tensor:
    """One row per token, or None for each token."""
    return [None] * count if x is None else to_rows(x)


def reversed_tokens(*xs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tokens' parts, last token first."""
    return zip(*(x.unbind(0)[::-1] for x in xs))
