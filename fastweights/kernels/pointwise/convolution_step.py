r"""Kernel of the short convolution over one more token, with the last W' inputs of each channel updated in place.

    y = silu(sum_j w_j e_(W'-W+1+j) + b),   e = (state_0, ..., state_(W'-1), x),   state_j <- e_(j+1)

A program holds the inputs of its channels in registers, one vector per place. A barrier stands between the loads and the stores:
the place that one thread writes is one that another may still have to read.
"""

# mypy: disable-error-code="assignment"
# (the tuple of places grows in the kernel)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.math import sigmoid
from ..runtime.launch_plan import launch

CHANNELS = 128  # per program


@triton.jit(do_not_specialize=["channels", "blocks", "stride_b", "stride_d"])
def step_kernel(
    x, state, weight, bias, y, channels, blocks, stride_b, stride_d,
    W: tl.constexpr, KEPT: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
    inside = channel < channels
    kept = state + (row * channels + channel) * KEPT
    places = ()
    for j in tl.static_range(KEPT):
        places = places + (tl.load(kept + j, inside, 0.0),)
    new = tl.load(x + row * stride_b + channel.to(tl.int64) * stride_d, inside, 0.0)
    c = new.to(tl.float32) * tl.load(weight + channel * W + (W - 1), inside, 0.0).to(tl.float32)
    if HAS_BIAS:
        c += tl.load(bias + channel, inside, 0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        tap = tl.load(weight + channel * W + j, inside, 0.0).to(tl.float32)
        c += places[KEPT - (W - 1) + j].to(tl.float32) * tap
    if SILU:
        c = c * sigmoid(c)
    tl.store(y + row * channels + channel, c.to(y.dtype.element_ty), inside)
    tl.debug_barrier()
    for j in tl.static_range(KEPT - 1):
        tl.store(kept + j, places[j + 1], inside)
    tl.store(kept + (KEPT - 1), new.to(state.dtype.element_ty), inside)


def step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """y [B, D, 1] of x [B, D, 1]; nothing is checked."""
    batch, channels, _ = x.shape
    y = torch.empty((batch, channels, 1), device=x.device, dtype=x.dtype)
    blocks = -(-channels // CHANNELS)
    launch(
        step_kernel, (batch * blocks,), x, state, weight.contiguous(), bias, y, channels, blocks, x.stride(0), x.stride(1),
        W=weight.shape[1], KEPT=state.shape[2], BD=CHANNELS, SILU=silu, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return y
