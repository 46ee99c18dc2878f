"""Vectors of length 1."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_rows
from ..framework.few_tokens import needs_gradient
from ..short_convolution.torch_form import l2_normalize as in_pytorch

__all__ = ["l2_normalize"]


def l2_normalize(x: Tensor, eps: float = 1e-6, *, backend: str = "auto") -> Tensor:
    r"""x / sqrt(|x|^2 + eps) over the last dimension, in x's dtype.

    On CUDA with triton installed one kernel computes it where no gradient is needed.

    Args:
        x: [..., V], any float dtype.
        eps: added to the squared length.
        backend: "torch", "triton" (not in float64, V up to 4096) or "auto".
    """
    if torch.compiler.is_compiling() or needs_gradient({"x": x}) or not takes_rows(backend, x):
        return in_pytorch(x, eps)
    from ...kernels.pointwise.l2_normalize import l2_normalize as kernel

    return kernel(x, eps)
