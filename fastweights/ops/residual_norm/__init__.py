"""A residual addition with the RMSNorm that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import takes_rows
from ..framework.checks import check_number, check_same_shape, check_tensor, compute_dtype, shape_of
from ..framework.node import Node, Tensors

__all__ = ["residual_norm"]


def torch_form(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    s = x if branch is None else (x + branch).to(x.dtype)
    # A sum with the offset in 16 bits would drop digits of the weight.
    scale = weight.to(s.dtype) if offset == 0 else weight.to(compute_dtype(s)) + offset
    return s, F.rms_norm(s.to(scale.dtype), s.shape[-1:], scale, eps).to(dtype)


class ResidualNorm:
    """The kernels as a node: (x, branch, weight), (eps, offset, dtype, through) -> s, n. Without a branch s is x with `through`,
    so that the kernel adds the gradients of both results, and else an empty vector: an op of a graph returns no input."""

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        from ...kernels.pointwise.residual_norm import forward

        (x, branch, weight), (eps, offset, dtype, through) = tensors, options
        assert x is not None and weight is not None
        s, n = forward(x, branch, weight, eps, offset, dtype)
        return (x if through else s, n), () if s is None else (s,)

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        x, branch, _ = tensors
        assert x is not None
        s = None if branch is None else x.new_empty(x.shape)
        return (s, x.new_empty(x.shape, dtype=options[2])), () if s is None else (s.clone(),)

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        from ...kernels.pointwise.residual_norm import backward

        (x, branch, weight), (ds, dn), (eps, offset, dtype, through) = tensors, output_grads, options
        assert x is not None and weight is not None
        ds = None if (branch is None and not through) or ds is None or not ds.numel() else ds
        dn = x.new_zeros(x.shape, dtype=dtype) if dn is None else dn
        return backward(ds, dn, saved[0] if saved and saved[0] is not None else x, branch, weight, eps, offset)


NODE = Node(
    "residual_norm", {"x": False, "branch": True, "weight": False},
    {"eps": "float", "offset": "float", "dtype": "ScalarType", "through": "bool"}, outputs=2, rule=ResidualNorm(),
)  # fmt: skip


def residual_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0,
    dtype: torch.dtype | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The sum of a residual stream and a branch, and its norm.

    $$s = x + b, \qquad n = \frac{s}{\sqrt{\mathrm{mean}(s^2) + \mathrm{eps}}}\, (w + o)$$

    RMSNorm: Zhang and Sennrich 2019, with weights around zero where the offset is 1. On CUDA with triton installed one kernel
    computes both in float32, and another all gradients from the sum alone; a second derivative needs backend "torch". A graph
    that torch.compile traces gets the PyTorch form, which its compiler joins with what stands around it, unless backend
    "triton" is asked for.

    Args:
        x: [..., V], float16, bfloat16, float32 or float64.
        branch: b, of the shape of x and any float dtype; None for s = x.
        weight: w, [V]. Any float dtype.
        eps: at least 0.
        offset: o, added to every weight, in float32 or better.
        dtype: of n; x's when None.
        backend: "torch", "triton" (not in float64; V up to 4096) or "auto": "triton" on CUDA where it serves, else "torch".

    Returns:
        s in x's dtype, x itself without a branch, and n.

    Raises:
        ValueError: a shape, dtype, device or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    check_tensor("x", x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must be [..., V] with V >= 1, got shape {shape_of(x)}")
    if check_tensor("weight", weight, x).shape != x.shape[-1:]:
        raise ValueError(f"weight must be {list(x.shape[-1:])}, got shape {shape_of(weight)}")
    if branch is not None:
        check_same_shape("branch", check_tensor("branch", branch, x), "x", x)
    check_number("eps", eps, low=0.0)
    check_number("offset", offset)
    dtype = x.dtype if dtype is None else dtype
    traced = torch.compiler.is_compiling()
    if not (traced and backend == "auto") and takes_rows(backend, x):
        s, n = NODE((x, branch, weight), (eps, offset, dtype, branch is None and not traced))
        return x if s is None else s, n
    return torch_form(x, branch, weight, eps, offset, dtype)
