"""Norms, and the precision of norms and gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.authoring import GATES, Normed, gated_rms_norm, l2_normalize, layer_norm, residual_norm
from .parts import HeadPart
from .wrapped import is_bare

__all__ = [
    "GatedRMSNorm",
    "GroupedRMSNorm",
    "HeadsLayerNorm",
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
    """torch's RMSNorm in the dtype of its input. Under autocast the weight is cast to it, so that the fused kernel is used."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def normalize_sum(
    norm: RMSNorm | LayerNorm, x: Tensor, branch: Tensor | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The residual stream x plus a branch (x itself without one), and the norm of this sum, in the dtype where one is given. Else
    the norm has autocast's dtype where it is on, so that it is cast once and not by every projection."""
    if not is_bare(norm, RMSNorm):
        s = x if branch is None else x + branch
        return s, norm(s)
    device = x.device.type
    if dtype is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return residual_norm(x, branch, norm.weight, eps=norm.eps, dtype=dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm of each head by itself, then a gate, in one op."""

    is_divided = False

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

    def of_rows(
        self, gate: Tensor | None, activation: str, value: Tensor | None = None, skip: Tensor | None = None
    ) -> Normed:
        """The same of few rows [..., heads * channels], as a part of the launch that multiplies them."""
        (width,) = self.normalized_shape
        return Normed(self.weight, self.eps, None, gate, value, skip, activation, width=width)


class GroupedRMSNorm(RMSNorm):
    """RMSNorm of equal groups of channels, each by itself, with one weight per channel.

    Attributes:
        span: how many parts of a layer share the one group that each has (`HeadPart.span`).
    """

    part, span = HeadPart(), 1

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__(channels, eps=eps)
        self.groups = groups

    @property
    def is_divided(self) -> bool:
        """Whether other parts of the layer have channels of the same groups."""
        return self.span > 1

    def forward(self, x: Tensor, gate: Tensor | None = None, activation: str = "silu", backend: str = "auto") -> Tensor:
        """The norm of x, or of x times the activation of the gate."""
        if self.is_divided:
            return self._normalize_shared_group(x, gate, activation)
        groups = x.unflatten(-1, (self.groups, -1))
        return gated_rms_norm(
            groups, self.weight.view(groups.shape[-2:]), None if gate is None else gate.view_as(groups),
            activation=activation, eps=self.eps, gate_first=True, backend=backend,
        ).flatten(-2)  # fmt: skip

    def of_rows(
        self, gate: Tensor | None, activation: str, value: Tensor | None = None, skip: Tensor | None = None
    ) -> Normed:
        """The same of few rows [..., channels], as a part of the launch that multiplies them; with value and skip of x + D v, for
        one D per head."""
        weight = self.weight.view(self.groups, -1)
        return Normed(weight, self.eps, None, gate, value, skip, activation, gate_first=True, width=weight.shape[1])

    def _normalize_shared_group(self, x: Tensor, gate: Tensor | None, activation: str) -> Tensor:
        y = at_least_float32(x)
        if gate is not None:
            y = y * GATES[activation](at_least_float32(gate))
        mean = self.part.gather_shared(y.square().mean(-1, keepdim=True), self.span).mean(-2)
        return (y * (mean + self.eps).rsqrt() * at_least_float32(self.weight)).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class HeadsLayerNorm(LayerNorm):
    """LayerNorm over the channels of all heads of a layer, including those of its other parts."""

    part = HeadPart()

    @property
    def is_divided(self) -> bool:
        """Whether other parts of the layer have some of the channels."""
        return self.part.parts > 1

    def of_rows(self) -> Normed:
        """The same of few rows [..., channels], without other parts, as a part of the launch that multiplies them."""
        return Normed(self.weight, self.eps, shift=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_divided:
            return super().forward(x)
        y = at_least_float32(x)
        moments = torch.cat(torch.var_mean(y, -1, correction=0, keepdim=True), -1)
        variances, means = self.part.gather_shared(moments, self.part.parts).unbind(-1)
        variance = variances.mean(-1, keepdim=True) + means.var(-1, correction=0, keepdim=True)
        y = (y - means.mean(-1, keepdim=True)) * (variance + self.eps).rsqrt()
        return (y * at_least_float32(self.weight) + at_least_float32(self.bias)).to(x.dtype)
