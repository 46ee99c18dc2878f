"""What stands around a memory: short convolution with SiLU and L2 norm, gated RMSNorm, residual addition with RMSNorm, SwiGLU.
One pass over the tensors each way. Also linear maps of the few rows of a decoding step, and step sizes with their decays."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Normed", "Product", "RowProducts", "TokenConvolution"]


class TokenConvolution(NamedTuple):
    """One convolution: x [N, 1, D], weight [D, W], bias, the last inputs [N, W-1, D] or a pool of them [P, W-1, D], and the
    channels of a head that is brought to length 1, None for none."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    window: Tensor
    head: int | None


class Product(NamedTuple):
    """A linear map of rows x [..., D], with what follows it.

    Attributes:
        weight: W, [width, D].
        kind: "plain" for x W^T + b, "add" for other + x W^T, "swiglu" for silu(x W^T) (x U^T), and in float32 "sigmoid" for
            largest sigmoid(x W^T + b) and "decay" for -exp(other) softplus(x W^T + b).
        bias: b, [width], or None for none.
        other: the residual [..., width], or numbers that serve equal groups of outputs.
        largest: see kind.
        more: U, [width, D].
    """

    weight: Tensor
    kind: str = "plain"
    bias: Tensor | None = None
    other: Tensor | None = None
    largest: float = 1.0
    more: Tensor | None = None


class Normed(NamedTuple):
    """x as the RMSNorm of a residual stream and a branch, which may be None; see `fastweights.ops.residual_norm`."""

    weight: Tensor
    eps: float
    branch: Tensor | None = None


class RowProducts(NamedTuple):
    """The results [..., width] of several products; of a `Normed` input also the sum s, None without a branch, and the norm n."""

    results: list[Tensor]
    s: Tensor | None
    n: Tensor | None
