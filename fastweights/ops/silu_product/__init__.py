"""The product of SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.checks import check_same_shape, check_tensor
from ..framework.node import KernelRule, Node, Tensors

__all__ = ["silu_product", "silu_product_of_halves"]


NODE = Node("silu_product", {"z": False, "u": False}, {}, outputs=1, rule=KernelRule("silu_product", like=1))


class Halves(KernelRule):
    """The kernels as a node: one tensor, whose halves are z and u -> y. Its gradient is one tensor, too."""

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        return (self.load().forward(*halves(tensors[0])),), ()

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        u = halves(tensors[0])[1]
        return (u.new_empty(u.shape),), ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        joint = tensors[0]
        assert joint is not None
        gradient = torch.empty_like(joint, memory_format=torch.contiguous_format)
        self.load().backward(output_grads[0], *halves(joint), into=halves(gradient))
        return (gradient,)


def halves(joint: Tensor | None) -> Sequence[Tensor]:
    assert joint is not None
    return joint.chunk(2, -1)


OF_HALVES = Node("silu_product_of_halves", {"joint": False}, {}, outputs=1, rule=Halves("silu_product"))


def silu_product_of_halves(joint: Tensor, backend: str = "auto") -> Tensor:
    """`silu_product` of z and u that lie side by side, [..., 2 V], by the same kernels also where torch.compile traces them: the
    gradients of both halves are written into one tensor."""
    if takes_kernels(backend, check_tensor("joint", joint)):
        return OF_HALVES((joint,), ())[0]
    return silu_product(*halves(joint), backend=backend)


def silu_product(z: Tensor, u: Tensor, *, backend: str = "auto") -> Tensor:
    r"""$$y = \mathrm{silu}(z)\, u$$

    Shazeer 2020 (SwiGLU). On CUDA with triton installed one kernel computes it in float32, and another its gradients from the
    inputs alone; a second derivative needs backend "torch". A graph that torch.compile traces gets the PyTorch form, unless
    backend "triton" is asked for.

    Args:
        z, u: of one shape; float16, bfloat16, float32 or float64.
        backend: "torch", "triton" (not in float64) or "auto": "triton" on CUDA where it serves, else "torch".

    Returns:
        y, of the shape and dtype of u.

    Raises:
        ValueError: a shape, dtype, device or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    check_tensor("z", z)
    check_same_shape("u", check_tensor("u", u, z), "z", z)
    traced = backend == "auto" and torch.compiler.is_compiling()
    if takes_kernels(backend, u) and u.ndim and not traced:
        return NODE((z, u), ())[0]
    return (F.silu(z) * u).to(u.dtype)
