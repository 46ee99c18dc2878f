r"""Kernels of the cross-entropy of rows of logits z: each pass reads every number once.

    forward     l = log sum_v exp(z_v), loss = l - z_target        a program has a row
    backward    g (exp(z - l) - [v = target])                      a program has a block of a row
    both        the loss, and exp(z - l) - [v = target] in the place of z, by a program per row: its second reading finds the
                row in the L2 cache

Rows whose target is the ignored one have no loss and no gradient. A target that is no class has the loss NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch_plan import launch

FORWARD_BLOCK, BACKWARD_BLOCK, WARPS = 4096, 4096, 8


@triton.jit
def sum_exponentials(z, width, readable, BV: tl.constexpr):
    """log sum_v exp(z_v) of the first `width` of the `readable` numbers of a row. A multiple of 16 of these makes loads wide."""
    lane = tl.arange(0, BV)
    largest = float("-inf")
    total = tl.zeros((BV,), tl.float32)  # of every lane; they meet once, at the end
    for first in range(0, width, BV):
        column = first + lane
        x = tl.load(z + column, column < readable, float("-inf"), eviction_policy="evict_last").to(tl.float32)
        x = tl.where(column < width, x, float("-inf"))
        higher = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.exp(x - base)  # NaN stays in the total
        largest = higher
    total = tl.sum(total, 0)
    return tl.where(largest == float("-inf"), 0.0, largest) + tl.log(total)


@triton.jit
def row_loss(z, wanted, log_sum, width, ignored):
    is_class = (wanted >= 0) & (wanted < width)
    chosen = tl.load(z + wanted, is_class, float("nan")).to(tl.float32)
    return tl.where(wanted != ignored, log_sum - chosen, 0.0)


@triton.jit
def cross_entropy_forward(z, target, log_sums, losses, width, stride, ignored, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z += row * stride
    log_sum = sum_exponentials(z, width, width, BV)
    wanted = tl.load(target + row)
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, row_loss(z, wanted, log_sum, width, ignored))


@triton.jit
def cross_entropy_both(z, target, losses, width, stride, ignored, BV: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    z += row * stride
    log_sum = sum_exponentials(z, width, stride, BV)
    wanted = tl.load(target + row)
    tl.store(losses + row, row_loss(z, wanted, log_sum, width, ignored))
    tl.debug_barrier()  # the number of the target is read before it is overwritten
    blocks = tl.cdiv(stride, BV)
    for block in range(0, blocks):  # from the end, which the cache still holds
        column = (blocks - 1 - block) * BV + lane
        x = tl.load(z + column, column < stride, 0.0, eviction_policy="evict_first").to(tl.float32)
        share = tl.exp(x - log_sum) - tl.where(column == wanted, 1.0, 0.0)
        found = tl.where((wanted == ignored) | (column >= width), 0.0, share).to(z.dtype.element_ty)
        tl.store(z + column, found, column < stride, eviction_policy="evict_first")


@triton.jit
def cross_entropy_backward(z, target, log_sums, gradient, error, width, blocks, ignored, BV: tl.constexpr):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BV + tl.arange(0, BV)
    wanted = tl.load(target + row)
    x = tl.load(z + row * width + column, column < width, 0.0).to(tl.float32)
    share = tl.exp(x - tl.load(log_sums + row)) - tl.where(column == wanted, 1.0, 0.0)
    found = tl.where(wanted == ignored, 0.0, share * tl.load(gradient).to(tl.float32))
    tl.store(error + row * width + column, found.to(error.dtype.element_ty), column < width)


def forward(z: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """l and loss [rows] in float32; nothing is checked."""
    z = z if z.stride(1) == 1 else z.contiguous()
    log_sums, losses = (torch.empty(len(z), device=z.device, dtype=torch.float32) for _ in range(2))
    launch(
        cross_entropy_forward, (len(z),), z, target.contiguous(), log_sums, losses, z.shape[1], z.stride(0), ignored,
        BV=FORWARD_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return log_sums, losses


def backward(z: Tensor, target: Tensor, log_sums: Tensor, gradient: Tensor, ignored: int) -> Tensor:
    """The gradient of z, in its dtype."""
    z = z.contiguous()
    error = torch.empty_like(z)
    blocks = -(-z.shape[1] // BACKWARD_BLOCK)
    launch(
        cross_entropy_backward, (len(z) * blocks,), z, target.contiguous(), log_sums.contiguous(), gradient, error,
        z.shape[1], blocks, ignored, BV=BACKWARD_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return error


def both(z: Tensor, target: Tensor, ignored: int, classes: int) -> Tensor:
    """loss [rows] in float32; the gradients of the losses take the place of z, which is contiguous, with 0 behind the classes."""
    losses = torch.empty(len(z), device=z.device, dtype=torch.float32)
    launch(
        cross_entropy_both, (len(z),), z, target.contiguous(), losses, classes, z.shape[1], ignored, BV=FORWARD_BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    return losses
