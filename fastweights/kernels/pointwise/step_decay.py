"""Kernels of Mamba-2's step sizes and log decays, and of parameters above a bound, without gradients:

dt = softplus(step + bias), kept within limits        g = -exp(min(A_log, 44)) dt        y = least + softplus(x)

In the place of dt the same launch may compute gains of a delta rule, beta = most sigmoid(gain).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import log_rate_and_rest, sigmoid, softplus
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import launch, make_rows_contiguous


@triton.jit(
    do_not_specialize=["stride", "smallest", "largest", "gain_stride", "most"],
    do_not_specialize_on_alignment=["step", "gain"],
)
def step_decay_kernel(
    step, bias, A_log, gain, dt, g, stride, smallest, largest, gain_stride, most, H: tl.constexpr, BH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has the heads of one token. gain: None for dt."""
    wait_for_inputs(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    here = head < H
    x = tl.load(step + token * stride + head, here, 0.0).to(tl.float32)
    y = softplus(x + tl.load(bias + head, here, 0.0).to(tl.float32))
    y = tl.where(y < smallest, smallest, tl.where(y > largest, largest, y))  # a NaN stays one
    log_rate, _ = log_rate_and_rest(tl.load(A_log + head, here, 0.0))
    tl.store(g + token * H + head, -tl.exp(log_rate) * y, here)
    if gain is not None:
        y = most * sigmoid(tl.load(gain + token * gain_stride + head, here, 0.0).to(tl.float32))
    tl.store(dt + token * H + head, y, here)


def step_decay(
    step: Tensor,
    bias: Tensor,
    A_log: Tensor,
    smallest: float,
    largest: float,
    gain: Tensor | None = None,
    most: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """dt and g [B, T, heads] in float32; with a gain [B, T, heads] beta in the place of dt. Nothing is checked. Rows of a slice
    of a joint projection are read where they lie."""
    rows, heads = make_rows_contiguous(step).flatten(0, 1), step.shape[2]
    gains = None if gain is None else make_rows_contiguous(gain).flatten(0, 1)
    dt, g = (step.new_empty(step.shape, dtype=torch.float32) for _ in range(2))
    if dt.numel():
        launch(
            step_decay_kernel, (len(rows),), rows, bias.contiguous(), A_log.contiguous(), gains, dt, g, rows.stride(0), smallest,
            largest, 0 if gains is None else gains.stride(0), most, H=heads, BH=padded(heads, 1), num_warps=1,
        )  # fmt: skip
    return dt, g


NUMBERS = 1024  # of a program


@triton.jit(do_not_specialize=["count", "least"])
def softplus_kernel(x, y, count, least, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + at, at < count, 0.0).to(tl.float32)
    tl.store(y + at, least + softplus(number), at < count)


def softplus_above(x: Tensor, least: float) -> Tensor:
    """y in float32, of the shape of x; nothing is checked."""
    y = x.new_empty(x.shape, dtype=torch.float32)
    if y.numel():
        launch(
            softplus_kernel,
            (-(-y.numel() // NUMBERS),),
            x.contiguous(),
            y,
            y.numel(),
            least,
            BLOCK=NUMBERS,
            num_warps=4,
        )
    return y
