"""A slot as direction and length, and what holds where it has none.

A slot of zeros has no direction: it answers nothing, is not written and stays zero. Every other slot keeps a direction: a
decay below the resolution of its dtype counts as that resolution, so that a slot which is forgotten and not written at one
token keeps the direction it had, and a slot that is not zero is at least SHORTEST long.
"""

from __future__ import annotations

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
