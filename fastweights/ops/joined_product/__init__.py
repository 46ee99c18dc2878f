"""The product of one input with several weights, for training: one matrix product forward and two backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..framework.node import define_op

__all__ = ["add_product_", "joined_product", "product_dtype", "product_in"]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the products of x with weights: autocast's where it is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def writes_float32(dtype: torch.dtype, a: Tensor) -> bool:
    """Whether products of a in the dtype need no conversion, as those of 16-bit numbers in float32 on CUDA, not on ROCm."""
    return (
        a.is_cuda
        and torch.version.hip is None
        and dtype == torch.float32
        and a.dtype in (torch.float16, torch.bfloat16)
    )


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N] in the dtype."""
    return torch.mm(a, b, out_dtype=dtype) if writes_float32(dtype, a) else (a @ b).to(dtype)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [M, K] times b [K, N] to the total."""
    if torch.compiler.is_compiling():  # which cannot lower the product with a dtype of its own
        total += weight_gradient(a.mT, b, total.dtype)
    elif writes_float32(total.dtype, a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return product_in(dtype, dy.flatten(0, -2).mT, x.flatten(0, -2))


def _empty_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return dy.new_empty((dy.shape[-1], x.shape[-1]), dtype=dtype)


# A node of a traced graph: a compiler would write the product in 16 bits and convert it.
weight_gradient = define_op(
    "weight_gradient",
    "(Tensor dy, Tensor x, ScalarType dtype) -> Tensor",
    _weight_gradient,
    _empty_gradient,
    any_strides=True,
)


def joined_product(x: Tensor, *weights: Tensor, multiple: int = 1) -> Tensor:
    r"""$$y = x\, [W_1; W_2; \dots]^\top$$

    The products of the input with several weights lie side by side, so that the gradient of x is one product, too, and no sum of
    several. Gradients of float32 weights are written in float32 and never rounded to 16 bits. No second derivatives.

    Args:
        x: [..., D]. Its dtype, or autocast's where it is on, is that of the products.
        weights: [E_1, D], [E_2, D], ... of one dtype.
        multiple: to which the columns are filled up, with zeros.

    Returns:
        y [..., E_1 + E_2 + ... + the zeros].
    """
    dtype = product_dtype(x)
    zeros = -sum(map(len, weights)) % multiple
    return _JoinedProduct.apply(x.to(dtype), dtype, zeros, *weights)


def _join(weights: Sequence[Tensor], dtype: torch.dtype, zeros: int) -> Tensor:
    parts = [weight.to(dtype) for weight in weights]
    if zeros:
        parts.append(parts[0].new_zeros(zeros, parts[0].shape[-1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _JoinedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, zeros: int, *weights: Tensor) -> Tensor:
        ctx.sizes, ctx.dtype = [*map(len, weights), zeros], dtype
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        return F.linear(x, _join(weights, dtype, zeros))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dx, of_weights = None, [None] * (len(ctx.sizes) - 1)
        # First, as torch.compile then rounds dy within the kernel that has made it: before the product, whose rows are flat, it
        # would not.
        if any(ctx.needs_input_grad[3:]):
            *of_weights, _ = weight_gradient(dy, x, weights[0].dtype).split(ctx.sizes)
        if ctx.needs_input_grad[0]:  # joined again: kept, they would be a second copy of the weights
            dx = (dy.flatten(0, -2) @ _join(weights, ctx.dtype, ctx.sizes[-1])).unflatten(0, dy.shape[:-1])
        return dx, None, None, *of_weights
