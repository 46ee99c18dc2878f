"""Kernel of a LayerNorm of a few rows, without gradients: y = (x - mean) / sqrt(variance + eps) weight + bias."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import launch, make_rows_contiguous


@triton.jit(do_not_specialize=["stride", "eps"])
def layer_norm_kernel(x, weight, bias, y, stride, eps, D: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr):
    """A program has one row. stride: from one row of x to the next."""
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    here = channel < D
    w, b = tl.load(weight + channel, here, 0.0), tl.load(bias + channel, here, 0.0)  # which no kernel writes
    wait_for_inputs(OVERLAP)
    number = tl.load(x + row * stride + channel, here, 0.0).to(tl.float32)
    moved = tl.where(here, number - tl.sum(number, 0) / D, 0.0)
    moved *= tl.rsqrt(tl.sum(moved * moved, 0) / D + eps)
    tl.store(y + row * D + channel, (moved * w.to(tl.float32) + b.to(tl.float32)).to(y.dtype.element_ty), here)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y in the shape and dtype of x [..., D]; nothing is checked."""
    rows = make_rows_contiguous(x).flatten(0, -2)
    y, width = x.new_empty(x.shape), x.shape[-1]
    tile = padded(width, 1)
    if y.numel():
        launch(
            layer_norm_kernel, (len(rows),), rows, weight.contiguous(), bias.contiguous(), y, rows.stride(0), eps, D=width,
            BD=tile, num_warps=max(1, min(8, tile // 256)),
        )  # fmt: skip
    return y
