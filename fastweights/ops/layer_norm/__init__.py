"""LayerNorm of the few rows of a decoding step, by one kernel whose launch overlaps its neighbours."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import WIDEST_ROW
from ..linear_rows import takes_linear_rows

__all__ = ["layer_norm"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """torch's LayerNorm over the last dimension, in the dtype of x [..., D]. Up to 64 rows of up to 4,096 numbers that need no
    gradient take a kernel on CUDA, outside of autocast."""
    if x.shape[-1] > WIDEST_ROW or not takes_linear_rows(x, weight, bias, backend=backend):
        return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)
    from ...kernels.pointwise.layer_norm import layer_norm

    return layer_norm(x, weight, bias, eps)
