"""Several products of one input: the matrix products of the backward add up its gradients, which nothing else has to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["products_of_one_input", "sums_gradients", "trains_on_gpu"]


def trains_on_gpu(x: Tensor) -> bool:
    """Whether x is on a GPU and needs a gradient."""
    return x.is_cuda and x.requires_grad and torch.is_grad_enabled()


def sums_gradients(x: Tensor) -> bool:
    """Whether `products_of_one_input` pays: eagerly on a GPU, for gradients. A compiler joins the sums with what follows."""
    return trains_on_gpu(x) and not torch.compiler.is_compiling()


def products_of_one_input(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x [..., D] times each of the weights [E, D], transposed, in autocast's dtype where it is on. No second derivatives."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return _Products.apply(x.to(dtype), dtype, *weights)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        weights = tuple(weight.to(dtype) for weight in weights)
        ctx.save_for_backward(x, *weights)
        with torch.autocast(x.device.type, enabled=False):
            return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = x.flatten(0, -2)
        of_x = None
        of_weights: list[Tensor | None] = []
        for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            rows = gradient.flatten(0, -2)
            of_x = rows @ weight if of_x is None else of_x.addmm_(rows, weight)
            wanted = ctx.needs_input_grad[2 + number]
            of_weights.append((rows.mT @ flat).to(ctx.dtypes[number]) if wanted else None)
        return None if of_x is None else of_x.view_as(x), None, *of_weights
