"""The same-precision twin: our chunkwise PyTorch form with every matrix product as tensor cores compute it, operands rounded to
the input dtype and sums in float32, forwards and backwards. Everything else (decays, gates, states between chunks) is float32.

It is the yardstick of a kernel: what must be rounded in a kernel is rounded here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from .cases import Case

__all__ = ["HAS_TWIN", "twin_results"]

# Iterative solvers have a backward of their own, which these products do not reach.
HAS_TWIN = frozenset({"linear", "simple_gla", "gla", "deltanet", "gdn", "gdn-write", "kda", "pgdn", "pkda"})


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype).float() @ b.to(dtype).float()


class Product(torch.autograd.Function):
    """a @ b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return multiply(a, b, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        da, db = multiply(d, b.mT, ctx.dtype), multiply(a.mT, d, ctx.dtype)
        return da.sum_to_size(a.shape), db.sum_to_size(b.shape), None


class Solution(torch.autograd.Function):
    """X of (I + A) X = B with A strictly lower triangular: the inverse of I + A in float32, then products with it."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, dtype: torch.dtype) -> Tensor:
        eye = torch.eye(A.shape[-1], device=A.device).expand_as(A)
        inverse = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        X = multiply(inverse, B, dtype)
        ctx.save_for_backward(inverse, X)
        ctx.dtype = dtype
        return X

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dX: Tensor) -> tuple[Tensor, Tensor, None]:
        inverse, X = ctx.saved_tensors
        dB = multiply(inverse.mT, dX, ctx.dtype)
        return -multiply(dB, X.mT, ctx.dtype).tril(-1), dB, None


class TensorCores(TorchFunctionMode):
    """Inside, `a @ b` and the unit triangular solve are the ones above."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.matmul, Tensor.matmul):
            return Product.apply(*args, self.dtype)
        if function is torch.linalg.solve_triangular:
            return Solution.apply(*args, self.dtype)
        return function(*args, **(kwargs or {}))


def twin_results(
    case: Case, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor], given: Mapping[str, Tensor], **more: Any
) -> dict[str, Tensor]:
    """As `results`. A kernel applies the factor on q after its products, where it costs no rounding: so here it multiplies o
    and, by linearity, the gradients, the cotangents of the states being divided by it."""
    dtype, scale = inputs["v"].dtype, inputs["k"].shape[-1] ** -0.5
    leaves = {name: x.detach().float().requires_grad_() for name, x in {**inputs, **states}.items()}
    tokens = {name: leaves[name] for name in inputs}
    initial = leaves["S"] if len(states) == 1 else tuple(leaves[name] for name in states)
    with TensorCores(dtype):
        o, final = case.ours(tokens, "torch", scale=1.0, initial_state=initial, output_final_state=True, **more)
    finals = final if isinstance(final, tuple) else (final,)
    shares = [given["o"].float(), *(given[name] / scale for name in states)]
    gradients = torch.autograd.grad([o, *finals], list(leaves.values()), shares)
    values = {"o": (o.detach() * scale).to(dtype), **{name: x.detach() for name, x in zip(states, finals)}}
    dtypes = {name: x.dtype for name, x in {**inputs, **states}.items()}
    return {**values, **{f"d{name}": (scale * x).to(dtypes[name]) for name, x in zip(leaves, gradients)}}
