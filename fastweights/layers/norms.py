"""Norms, and the precision they and the gates are computed in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RMSNorm", "at_least_float32", "l2_normalize"]


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
