"""Norms, and the precision of norms and gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.authoring import gated_rms_norm, l2_normalize, residual_norm
from .wrapped import is_bare

__all__ = [
    "GatedRMSNorm",
    "GroupedRMSNorm",
    "LayerNorm",
    "RMSNorm",
    "at_least_float32",
    "l2_normalize",
    "normalize_sum",
]


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is when it is float64: the precision of gates and norms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, in the dtype of its input: under autocast the weight follows, which keeps the fused kernel."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def normalize_sum(norm: RMSNorm | LayerNorm, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    """The residual stream x plus a branch (x itself without one), and its norm for projections: under autocast in autocast's
    dtype, so that not every one of them casts it."""
    if not is_bare(norm, RMSNorm):
        s = x if branch is None else x + branch
        return s, norm(s)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return residual_norm(x, branch, norm.weight, eps=norm.eps, dtype=dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm of each head by itself, then a gate, in one op."""

    def forward(
        self,
        x: Tensor,
        gate: Tensor | None = None,
        activation: str = "silu",
        value: Tensor | None = None,
        skip: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """The norm of x, or of x + skip value, times the activation of the gate. See `fastweights.ops.gated_rms_norm`."""
        return gated_rms_norm(
            x, self.weight, gate, activation=activation, eps=self.eps, value=value, skip=skip, backend=backend
        )


class GroupedRMSNorm(RMSNorm):
    """RMSNorm of equal groups of channels, each by itself, with one weight per channel."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__(channels, eps=eps)
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor | None = None, activation: str = "silu", backend: str = "auto") -> Tensor:
        """The norm of x, or of x times the activation of the gate."""
        groups = x.unflatten(-1, (self.groups, -1))
        return gated_rms_norm(
            groups, self.weight.view(groups.shape[-2:]), None if gate is None else gate.view_as(groups),
            activation=activation, eps=self.eps, gate_first=True, backend=backend,
        ).flatten(-2)  # fmt: skip


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
