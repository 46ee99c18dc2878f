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

BACKWARD_BLOCK, WARPS = 4096, 8
ROW_WARPS = 16  # of a program that has a row: the L2 cache holds all rows that are read at the same time
ROW_LOADS = 4  # of a thread at the same time


@triton.jit
def columns_from(first, LANES: tl.constexpr, J: tl.constexpr, E: tl.constexpr):
    """[J, LANES, E]: J times E neighbouring columns of every thread, so that a thread has those of a lane."""
    j, lane, e = tl.arange(0, J), tl.arange(0, LANES), tl.arange(0, E)
    return first + j[:, None, None] * (LANES * E) + lane[None, :, None] * E + e[None, None, :]


@triton.jit
def sum_exponentials(z, width, LANES: tl.constexpr, J: tl.constexpr, E: tl.constexpr):
    """log sum_v exp(z_v) of a row. Every lane has a sum and its scale; they meet once, at the end."""
    largest, total = tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), tl.float32)
    for first in range(0, width, LANES * J * E):
        column = columns_from(first, LANES, J, E)
        x = tl.load(z + column, column < width, float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(tl.max(x, 2), 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # NaN stays in the total.
        total = total * tl.exp(largest - base) + tl.sum(tl.sum(tl.exp(x - base[None, :, None]), 2), 0)
        largest = higher
    most = tl.max(largest, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    return base + tl.log(tl.sum(total * tl.exp(largest - base), 0))


@triton.jit
def row_loss(z, wanted, log_sum, width, ignored):
    is_class = (wanted >= 0) & (wanted < width)
    chosen = tl.load(z + wanted, is_class, float("nan")).to(tl.float32)
    return tl.where(wanted != ignored, log_sum - chosen, 0.0)


@triton.jit
def cross_entropy_forward(
    z, target, log_sums, losses, width, ignored, LANES: tl.constexpr, J: tl.constexpr, E: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    log_sum = sum_exponentials(z + row * width, width, LANES, J, E)
    wanted = tl.load(target + row)
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, row_loss(z + row * width, wanted, log_sum, width, ignored))


@triton.jit
def cross_entropy_both(z, target, losses, width, ignored, LANES: tl.constexpr, J: tl.constexpr, E: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z += row * width
    log_sum = sum_exponentials(z, width, LANES, J, E)
    wanted = tl.load(target + row)
    tl.store(losses + row, row_loss(z, wanted, log_sum, width, ignored))
    tl.debug_barrier()  # the number of the target is read before it is overwritten
    for first in range(0, width, LANES * J * E):
        column = columns_from(first, LANES, J, E)
        x = tl.load(z + column, column < width, 0.0).to(tl.float32)
        share = tl.exp(x - log_sum) - tl.where(column == wanted, 1.0, 0.0)
        tl.store(z + column, tl.where(wanted == ignored, 0.0, share).to(z.dtype.element_ty), column < width)


@triton.jit
def cross_entropy_backward(z, target, log_sums, gradient, error, width, blocks, ignored, BV: tl.constexpr):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BV + tl.arange(0, BV)
    wanted = tl.load(target + row)
    x = tl.load(z + row * width + column, column < width, 0.0).to(tl.float32)
    share = tl.exp(x - tl.load(log_sums + row)) - tl.where(column == wanted, 1.0, 0.0)
    found = tl.where(wanted == ignored, 0.0, share * tl.load(gradient).to(tl.float32))
    tl.store(error + row * width + column, found.to(error.dtype.element_ty), column < width)


def row_tile(z: Tensor) -> dict[str, int]:
    """What a program that has a row of z reads at a time: neighbouring numbers only where every row begins at a whole load."""
    numbers = max(16 // z.element_size(), 1)
    neighbours = numbers if z.shape[1] % numbers == 0 else 1
    return {"LANES": 32 * ROW_WARPS, "J": ROW_LOADS * numbers // neighbours, "E": neighbours, "num_warps": ROW_WARPS}


def forward(z: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """l and loss [rows] in float32; nothing is checked."""
    log_sums, losses = (torch.empty(len(z), device=z.device, dtype=torch.float32) for _ in range(2))
    launch(
        cross_entropy_forward, (len(z),), z.contiguous(), target.contiguous(), log_sums, losses, z.shape[1], ignored,
        **row_tile(z),
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


def both(z: Tensor, target: Tensor, ignored: int) -> Tensor:
    """loss [rows] in float32; the gradients of the losses take the place of z, which is contiguous."""
    losses = torch.empty(len(z), device=z.device, dtype=torch.float32)
    launch(cross_entropy_both, (len(z),), z, target.contiguous(), losses, z.shape[1], ignored, **row_tile(z))
    return losses
