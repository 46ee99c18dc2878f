"""Linear maps of a few rows, such as those of decoding, in one launch with the function that follows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient

__all__ = ["linear_rows", "takes_linear_rows"]

MOST_ROWS = 64


def takes_linear_rows(x: Tensor, *others: Tensor | None, backend: str = "auto") -> bool:
    """Whether the kernel serves x [..., D]: at most 64 rows, matrices in its dtype, vectors in any, no gradients, no autocast, no
    graph that is traced."""
    given = [y for y in others if y is not None]
    return (
        takes_kernels(backend, x)
        and not torch.compiler.is_compiling()
        and x.numel() <= MOST_ROWS * x.shape[-1]
        and all(y.device == x.device and (y.dtype == x.dtype or y.ndim == 1) for y in given)
        and not torch.is_autocast_enabled(x.device.type)
        and not needs_gradient({"x": x, **{str(i): y for i, y in enumerate(given)}})
    )


def linear_rows(
    x: Tensor, *weights: Tensor, kind: str = "plain", bias: Tensor | None = None, other: Tensor | None = None,
    largest: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    r"""One result [..., width] per matrix, or one in all for "swiglu", for x [..., D] that `takes_linear_rows` allows.

    Args:
        weights: matrices [width, D]: up to three of kind "plain", two of kind "swiglu", one of the others.
        kind: "plain" for x W^T + b of every matrix, "add" for other + x W^T, "swiglu" for silu(x W_0^T) (x W_1^T), and in float32
            "sigmoid" for largest sigmoid(x W^T + b) and "decay" for -exp(other) softplus(x W^T + b).
        bias: [width], of a single matrix.
        other: the residual [..., width], or numbers that serve equal groups of outputs.
    """
    from ...kernels.pointwise.linear_rows import linear_rows

    return linear_rows(x, weights, kind, bias, other, largest)
