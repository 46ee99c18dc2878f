r"""Kernels of a residual addition with the RMSNorm that reads it: each pass reads every row once.

    s = x + b,    n = s r (w + o),    r = 1 / sqrt(mean(s^2) + eps)

The backward needs s alone. With dn the gradient of n times w + o, and ds that of s from elsewhere,

    dx = db = ds + r (dn - s r mean(dn s r)),    dw = sum over the rows of the gradient of n times s r

Without b there is no s to write, and x stands in its place. A program loops over tiles of R rows and writes its sum for w,
[tiles, V]; the sums are added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import alignment, launch, make_rows_contiguous
from .gated_norm import choose_tile, load_rows, normalize_rows
from .tile_sums import sum_tiles

VARYING = ["rows", "steps", "eps", "offset"]  # a single row gets no kernel of its own
FORWARD_NUMBERS, BACKWARD_NUMBERS = 16, 8  # numbers of an input per thread
ENOUGH_PROGRAMS = 1024


@triton.jit(do_not_specialize=VARYING)
def residual_norm_forward(
    x, branch, weight, s, n, rows, stride_x, stride_branch, eps, offset,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, BV)
    here = (row < rows)[:, None] & (column < V)[None, :]
    at = row[:, None] * V + column[None, :]
    u = load_rows(x, row, stride_x, here, BV, ALIGN)
    w = tl.load(weight + column, column < V, 0.0).to(tl.float32)[None, :] + offset
    if branch is not None:
        u += load_rows(branch, row, stride_branch, here, BV, ALIGN)
        rounded = u.to(s.dtype.element_ty)
        tl.store(s + at, rounded, here)
        u = rounded.to(tl.float32)  # the backward knows the sum as it is written
    y, _ = normalize_rows(u, V, eps)
    tl.store(n + at, (y * w).to(n.dtype.element_ty), here)


@triton.jit(do_not_specialize=VARYING)
def residual_norm_backward(
    ds, dn, s, weight, dx, dbranch, dw_sums, rows, steps, stride_ds, stride_dn, stride_s, eps, offset,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0), tl.arange(0, BV)
    w = tl.load(weight + column, column < V, 0.0).to(tl.float32)[None, :] + offset
    dw = tl.zeros((R, BV), tl.float32)
    for step in range(steps):
        row = (tile * steps + step).to(tl.int64) * R + tl.arange(0, R)
        here = (row < rows)[:, None] & (column < V)[None, :]
        at = row[:, None] * V + column[None, :]
        u = load_rows(s, row, stride_s, here, BV, ALIGN)
        d = load_rows(dn, row, stride_dn, here, BV, ALIGN)
        y, r = normalize_rows(u, V, eps)
        dw += d * y
        d *= w
        d = r * (d - y * (tl.sum(d * y, 1) / V)[:, None])
        if ds is not None:
            d += load_rows(ds, row, stride_ds, here, BV, ALIGN)
        tl.store(dx + at, d.to(dx.dtype.element_ty), here)
        if dbranch is not None:
            tl.store(dbranch + at, d.to(dbranch.dtype.element_ty), here)
    tl.store(dw_sums + tile.to(tl.int64) * V + column, tl.sum(dw, 0), column < V)


def flatten_rows(x: Tensor | None) -> Tensor | None:
    """[..., V] as [M, V], rows contiguous."""
    return None if x is None else make_rows_contiguous(x).flatten(0, -2) if x.ndim > 1 else x[None]


def row_stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, offset: float, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """s (None without a branch) and n in `dtype`; nothing is checked."""
    s = None if branch is None else x.new_empty(x.shape)
    n = x.new_empty(x.shape, dtype=dtype)
    if n.numel():
        flat, added = flatten_rows(x), flatten_rows(branch)
        assert flat is not None
        rows, width = flat.shape
        whole, tile, warps = choose_tile(width, FORWARD_NUMBERS)
        strides = flat.stride(0), row_stride(added)
        launch(
            residual_norm_forward, (-(-rows // tile),), flat, added, weight.contiguous(), s, n, rows, *strides, eps,
            offset, V=width, BV=whole, R=tile, ALIGN=alignment(width, *strides), num_warps=warps,
        )  # fmt: skip
    return s, n


def backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, branch: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of x, the branch (None without one) and weight."""
    dx = s.new_empty(s.shape)
    dbranch = None if branch is None or branch.dtype == dx.dtype else branch.new_empty(branch.shape)
    if not dx.numel():
        return dx, None if branch is None else branch.new_empty(branch.shape), torch.zeros_like(weight)
    sum_grad, norm_grad, read = flatten_rows(ds), flatten_rows(dn), flatten_rows(s)
    assert norm_grad is not None and read is not None
    rows, width = read.shape
    whole, tile, warps = choose_tile(width, BACKWARD_NUMBERS)
    steps = max(1, -(-rows // tile) // ENOUGH_PROGRAMS)
    programs = -(-rows // (tile * steps))
    dw = torch.empty((programs, width), device=s.device, dtype=torch.float32)
    strides = row_stride(sum_grad), norm_grad.stride(0), read.stride(0)
    launch(
        residual_norm_backward, (programs,), sum_grad, norm_grad, read, weight.contiguous(), dx, dbranch, dw, rows, steps,
        *strides, eps, offset, V=width, BV=whole, R=tile, ALIGN=alignment(width, *strides), num_warps=warps,
    )  # fmt: skip
    return dx, dx if branch is not None and dbranch is None else dbranch, sum_tiles(dw, weight.dtype)
