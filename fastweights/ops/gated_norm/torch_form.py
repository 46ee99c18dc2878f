"""The gated norm in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["GATES", "torch_form"]

GATES = {"silu": F.silu, "sigmoid": F.sigmoid, "gelu": F.gelu}


def torch_form(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    value: Tensor | None,
    skip: Tensor | None,
    activation: str,
    eps: float,
    gate_first: bool,
) -> Tensor:
    dtype, scale = x.dtype, weight.to(x.dtype)
    if value is not None and skip is not None:
        x = torch.addcmul(x, skip[:, None].to(value.dtype), value)
    if gate is not None and gate_first:
        x = x * GATES[activation](gate)
    y = F.rms_norm(x, x.shape[-1:], scale, eps) if weight.ndim == 1 else F.rms_norm(x, x.shape[-1:], eps=eps) * scale
    if gate is not None and not gate_first:
        y = y * GATES[activation](gate)
    return y.to(dtype)
