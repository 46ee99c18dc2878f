"""Sums over the tiles of a backward, in a fixed order. One small launch: torch's reduction clears counters by another one before,
and for these few numbers takes two or three times as long."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..runtime.launch_plan import launch

NUMBERS = 4096  # of a step of a program
COLUMNS = (8, 64)  # of a program: a sector of memory at least
ENOUGH_PROGRAMS = 128
WARPS = 8


@triton.jit(do_not_specialize=["tiles", "width"])
def sum_tiles_kernel(sums, total, tiles, width, BT: tl.constexpr, BN: tl.constexpr):
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    found = tl.zeros((BT, BN), tl.float32)
    for first in range(0, tiles, BT):
        tile = first + tl.arange(0, BT)
        at = tile.to(tl.int64)[:, None] * width + column[None, :]
        found += tl.load(sums + at, (tile < tiles)[:, None] & (column < width)[None, :], 0.0)
    tl.store(total + column, tl.sum(found, 0).to(total.dtype.element_ty), column < width)


def sum_tiles(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension of contiguous float32 sums [tiles, ...], in the dtype."""
    total = sums.new_empty(sums.shape[1:], dtype=dtype)
    width = total.numel()
    columns = min(max(padded(-(-width // ENOUGH_PROGRAMS), COLUMNS[0]), COLUMNS[0]), COLUMNS[1])
    launch(
        sum_tiles_kernel, (-(-width // columns),), sums, total, len(sums), width, BT=NUMBERS // columns, BN=columns,
        num_warps=WARPS,
    )  # fmt: skip
    return total
