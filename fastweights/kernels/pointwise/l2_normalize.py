"""Kernel of vectors of length 1, over the last dimension and in float32:

    y = x / sqrt(|x|^2 + eps)

It has no gradients: where these are needed the op computes y in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import launch, make_rows_contiguous


@triton.jit(do_not_specialize=["stride", "eps"])
def l2_normalize_kernel(x, y, stride, eps, V: tl.constexpr, BV: tl.constexpr, OVERLAP: tl.constexpr):
    """A program has one vector. stride: from one vector of x to the next."""
    wait_for_inputs(OVERLAP)
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    here = channel < V
    number = tl.load(x + row * stride + channel, here, 0.0).to(tl.float32)
    number = number * tl.rsqrt(tl.sum(number * number, 0) + eps)
    tl.store(y + row * V + channel, number.to(y.dtype.element_ty), here)


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """y in x's dtype; nothing is checked. Vectors that are slices of longer ones are read where they lie."""
    width = x.shape[-1]
    rows = make_rows_contiguous(x).reshape(-1, width)
    y, tile = x.new_empty(x.shape), padded(width, 1)
    if y.numel():
        launch(
            l2_normalize_kernel, (len(rows),), rows, y, rows.stride(0), eps, V=width, BV=tile,
            num_warps=max(1, min(8, tile // 256)),
        )  # fmt: skip
    return y
