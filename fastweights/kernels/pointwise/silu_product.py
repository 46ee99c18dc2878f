r"""Kernels of the product of SwiGLU: each pass reads every number once, and the backward needs only the inputs.

y = silu(z) u        dz = dy u silu'(z)        du = dy silu(z)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch_plan import launch
from .gated_norm import activate

BLOCK, WARPS = 2048, 8  # numbers per program


@triton.jit
def silu_product_forward(z, u, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    a, _ = activate(tl.load(z + at, here, 0.0).to(tl.float32), "silu")
    tl.store(y + at, (a * tl.load(u + at, here, 0.0).to(tl.float32)).to(y.dtype.element_ty), here)


@triton.jit
def silu_product_backward(dy, z, u, dz, du, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    a, da = activate(tl.load(z + at, here, 0.0).to(tl.float32), "silu")
    d = tl.load(dy + at, here, 0.0).to(tl.float32)
    tl.store(dz + at, (d * tl.load(u + at, here, 0.0).to(tl.float32) * da).to(dz.dtype.element_ty), here)
    tl.store(du + at, (d * a).to(du.dtype.element_ty), here)


def forward(z: Tensor, u: Tensor) -> Tensor:
    """y; nothing is checked."""
    z, u = z.contiguous(), u.contiguous()
    y = u.new_empty(u.shape)
    launch(silu_product_forward, (-(-y.numel() // BLOCK),), z, u, y, y.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return y


def backward(dy: Tensor, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of z and u."""
    dy, z, u = dy.contiguous(), z.contiguous(), u.contiguous()
    dz, du = z.new_empty(z.shape), u.new_empty(u.shape)
    launch(
        silu_product_backward, (-(-u.numel() // BLOCK),), dy, z, u, dz, du, u.numel(), BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return dz, du
