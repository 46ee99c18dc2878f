r"""Kernels of log decays per channel: each pass reads every number once, and the backward needs only the inputs.

g = -A softplus(f + b)        df = -dg A sigmoid(f + b)        db = sum of df        dA = -sum of dg softplus(f + b)

with one A and b per channel. A program of the backward loops over tiles of R rows and writes its sums, [2, tiles, V], which are
added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.math import sigmoid, softplus
from ..runtime.launch_plan import alignment, launch
from .gated_norm import choose_tile, load_rows
from .residual_norm import flatten_rows
from .tile_sums import sum_tiles

FORWARD_NUMBERS, BACKWARD_NUMBERS = 16, 8  # numbers of an input per thread
ENOUGH_PROGRAMS = 1024


@triton.jit(do_not_specialize=["rows"])
def channel_decay_forward(
    f, bias, rate, g, rows, stride_f, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, BV)
    here = (row < rows)[:, None] & (column < V)[None, :]
    u = load_rows(f, row, stride_f, here, BV, ALIGN) + tl.load(bias + column, column < V, 0.0)[None, :]
    found = -tl.load(rate + column, column < V, 0.0)[None, :] * softplus(u)
    tl.store(g + (row * V)[:, None] + column[None, :], found, here)


@triton.jit(do_not_specialize=["rows", "steps", "tiles"])
def channel_decay_backward(
    dg, f, bias, rate, df, sums, rows, steps, tiles, stride_dg, stride_f,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0), tl.arange(0, BV)
    b = tl.load(bias + column, column < V, 0.0)[None, :]
    A = tl.load(rate + column, column < V, 0.0)[None, :]
    db, dA = tl.zeros((R, BV), tl.float32), tl.zeros((R, BV), tl.float32)
    for step in range(steps):
        row = (tile * steps + step).to(tl.int64) * R + tl.arange(0, R)
        here = (row < rows)[:, None] & (column < V)[None, :]
        u = load_rows(f, row, stride_f, here, BV, ALIGN) + b
        d = -load_rows(dg, row, stride_dg, here, BV, ALIGN)
        of_f = d * A * sigmoid(u)
        db += of_f
        dA += d * softplus(u)
        tl.store(df + (row * V)[:, None] + column[None, :], of_f.to(df.dtype.element_ty), here)
    at = tile.to(tl.int64) * V + column
    tl.store(sums + at, tl.sum(db, 0), column < V)
    tl.store(sums + tiles.to(tl.int64) * V + at, tl.sum(dA, 0), column < V)


def forward(f: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    """g in float32, for f [..., V] and float32 vectors [V]; nothing is checked."""
    made = f.new_empty(f.shape, dtype=torch.float32)
    if made.numel():
        flat = flatten_rows(f)
        assert flat is not None
        rows, width = flat.shape
        whole, tile, warps = choose_tile(width, FORWARD_NUMBERS)
        launch(
            channel_decay_forward, (-(-rows // tile),), flat, bias.contiguous(), rate.contiguous(), made, rows, flat.stride(0),
            V=width, BV=whole, R=tile, ALIGN=alignment(width, flat.stride(0)), num_warps=warps,
        )  # fmt: skip
    return made


def backward(dg: Tensor, f: Tensor, bias: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of f, bias and rate."""
    df = f.new_empty(f.shape)
    if not df.numel():
        return df, torch.zeros_like(bias), torch.zeros_like(rate)
    of_g, flat = flatten_rows(dg), flatten_rows(f)
    assert of_g is not None and flat is not None
    rows, width = flat.shape
    whole, tile, warps = choose_tile(width, BACKWARD_NUMBERS)
    steps = max(1, -(-rows // tile) // ENOUGH_PROGRAMS)
    programs = -(-rows // (tile * steps))
    sums = torch.empty((2, programs, width), device=f.device, dtype=torch.float32)
    strides = of_g.stride(0), flat.stride(0)
    launch(
        channel_decay_backward, (programs,), of_g, flat, bias.contiguous(), rate.contiguous(), df, sums, rows, steps, programs,
        *strides, V=width, BV=whole, R=tile, ALIGN=alignment(width, *strides), num_warps=warps,
    )  # fmt: skip
    of_bias, of_rate = (sum_tiles(one, torch.float32) for one in sums)
    return df, of_bias, of_rate
