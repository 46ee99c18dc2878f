"""What stands around a memory: short convolution with SiLU and L2 norm, gated RMSNorm, residual addition with RMSNorm, SwiGLU.
One pass over the tensors each way. Also linear maps of the few rows of a decoding step, and step sizes with their decays."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["FEW_ROWS", "Normed", "Product", "RowProducts", "TokenConvolution"]

FEW_ROWS = 2  # of a linear map that need no tensor cores


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
            largest exp(other) sigmoid(x W^T + b), "decay" for -exp(other) softplus(x W^T + b), "forget" for its
            exponential and "logsigmoid" for largest log(sigmoid(x W^T + b)); "tanh" for tanh(x W^T + b).
        bias: b, [width], or None for none.
        other: the residual [..., width], or numbers that serve equal groups of outputs; None for none, and for 0.
        largest: see kind.
        more: U, [width, D].
        rounds: whether a result that is in float32 otherwise has the dtype of x.
    """

    weight: Tensor
    kind: str = "plain"
    bias: Tensor | None = None
    other: Tensor | None = None
    largest: float = 1.0
    more: Tensor | None = None
    rounds: bool = False


class Normed(NamedTuple):
    """x [..., D] as the RMSNorm of rows: of a residual stream and a branch (`fastweights.ops.residual_norm`), or of the heads of
    an answer with their gate (`fastweights.ops.gated_rms_norm`). With a shift x is the LayerNorm of rows.

    Attributes:
        weight: [width], or one number per channel [D / width, width].
        branch: of the shape of x, or None for none.
        gate, value, skip, activation, gate_first: of the gated norm; gate and value [..., D], and skip one number per equal group
            of channels, which may be others than those that are normalised.
        width: of a head; None for all D.
        shift: the bias of a LayerNorm over all D, [D]; without branch, gate, value, skip and width.
    """

    weight: Tensor
    eps: float
    branch: Tensor | None = None
    gate: Tensor | None = None
    value: Tensor | None = None
    skip: Tensor | None = None
    activation: str = "silu"
    gate_first: bool = False
    width: int | None = None
    shift: Tensor | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the sum and the norm are results, too: those of a residual stream."""
        return self.width is None and self.shift is None


class RowProducts(NamedTuple):
    """The results [..., width] of several products; of a `Normed` input also the sum s, None without a branch, and the norm n."""

    results: list[Tensor]
    s: Tensor | None
    n: Tensor | None
