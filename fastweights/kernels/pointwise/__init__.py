"""What stands around a memory: short convolution with SiLU and L2 norm, gated RMSNorm, residual addition with RMSNorm, SwiGLU.
One pass over the tensors each way. Also linear maps of the few rows of a decoding step, and step sizes with their decays."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["TokenConvolution"]


class TokenConvolution(NamedTuple):
    """One convolution: x [N, 1, D], weight [D, W], bias, the last inputs [N, W-1, D] or a pool of them [P, W-1, D], and the
    channels of a head that is brought to length 1, None for none."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    window: Tensor
    head: int | None
