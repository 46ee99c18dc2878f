"""The product of SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.checks import check_same_shape, check_tensor
from ..framework.node import KernelRule, Node

__all__ = ["silu_product"]


NODE = Node("silu_product", {"z": False, "u": False}, {}, outputs=1, rule=KernelRule("silu_product", like=1))


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
    if takes_kernels(backend, u) and not traced:
        return NODE((z, u), ())[0]
    return (F.silu(z) * u).to(u.dtype)
