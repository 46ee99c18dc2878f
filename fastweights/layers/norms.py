"""Norms, and the precision they and the gates are computed in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GroupedRMSNorm", "LayerNorm", "RMSNorm", "at_least_float32", "l2_normalize"]


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is when it is float64: the precision of gates and norms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, in x's dtype."""
    y = at_least_float32(x)
    return (y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, in the dtype of its input: under autocast the weight follows, which keeps the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GroupedRMSNorm(RMSNorm):
    """RMSNorm of equal groups of channels, each by itself, with one weight a channel."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__(channels, eps=eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
