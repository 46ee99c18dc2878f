"""Rotary position embedding (RoFormer): turns pairs of channels by an angle proportional to the token's position."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(x_BTHK: Tensor, position: Tensor, theta: float) -> Tensor:
    """x [B, T, H, K] turned by position [B or 1, T]; channel i goes with channel i + K/2, at theta^(-2i/K) a token.

    The angles are computed here and not kept, in float32: positions are exact up to 2^24.
    """
    half = x_BTHK.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x_BTHK.device, dtype=torch.float32) / half)
    angle = (position[..., None].float() * frequency)[:, :, None]
    cos, sin = angle.cos().to(x_BTHK.dtype), angle.sin().to(x_BTHK.dtype)
    a, b = x_BTHK[..., :half], x_BTHK[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
