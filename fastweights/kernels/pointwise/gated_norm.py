r"""Kernels of the gated norm: each pass reads every row once, and the backward needs only the inputs.

    gate after:   n = x / rms(x),  y = n w a(z)            gate first:   n = u / rms(u),  u = x a(z),  y = n w

with rms(x) = sqrt(mean(x^2) + eps) and, with a skip, x + D v in the place of x, one D per group. With dn the gradient of n,

    d(x or u) = (dn - n mean(dn n)) / rms,   dw = sum over the rows of dy n (times a where the gate comes after)
    dv = D dx,   dD = sum of dx v

A program loops over tiles of R rows of one group and writes its sums for w, [tiles, G, V], and D, [tiles, G]; the sums are added
in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import sigmoid
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import alignment, launch, make_rows_contiguous
from .tile_sums import sum_tiles

INVERSE_SQRT_2 = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
VARYING = ["rows", "steps", "eps"]  # a single row gets no kernel of its own
FORWARD_NUMBERS, BACKWARD_NUMBERS = 16, 8  # numbers of an input per thread
ENOUGH_PROGRAMS = 1024


@triton.jit
def activate(z, GATE: tl.constexpr):
    """a(z) and its derivative."""
    if GATE == "gelu":
        share = 0.5 + 0.5 * tl.erf(z * INVERSE_SQRT_2)
        a = z * share
        da = share + z * INVERSE_SQRT_2PI * tl.exp(-0.5 * z * z)
    elif GATE == "silu":
        share = sigmoid(z)
        a = z * share
        da = share + a * (1 - share)
    else:
        a = sigmoid(z)
        da = a * (1 - a)
    return a, da


@triton.jit
def normalize_rows(u, V, eps):
    """u / rms(u) of every row, and 1 / rms(u)."""
    r = tl.rsqrt(tl.sum(u * u, 1) / V + eps)[:, None]
    return u * r, r


@triton.jit
def known_multiple(stride, ALIGN: tl.constexpr):
    """The stride, known to be a multiple of ALIGN. Triton compiles a stride of 1 in as a constant."""
    return tl.multiple_of(stride, ALIGN) if ALIGN > 1 else stride


@triton.jit
def load_rows(x, row, stride, here, BV: tl.constexpr, ALIGN: tl.constexpr):
    """Rows [R, BV] of x in float32."""
    at = (row * known_multiple(stride, ALIGN))[:, None] + tl.arange(0, BV)[None, :]
    return tl.load(x + at, here, 0.0).to(tl.float32)


@triton.jit
def load_group_rows(x, group, row, stride, group_stride, here, BV: tl.constexpr, ALIGN: tl.constexpr):
    return load_rows(x + group * known_multiple(group_stride, ALIGN), row, stride, here, BV, ALIGN)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    x, z, v, skip, weight, y, rows, groups,
    stride_x, group_stride_x, stride_z, group_stride_z, stride_v, group_stride_v, eps,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, GATE: tl.constexpr, FIRST: tl.constexpr, PER_GROUP: tl.constexpr,
    ALIGN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    group = (tl.program_id(0) % groups).to(tl.int64)
    row = (tl.program_id(0) // groups) * R + tl.arange(0, R)
    column = tl.arange(0, BV)
    here = (row < rows)[:, None] & (column < V)[None, :]
    row = row.to(tl.int64)
    u = load_group_rows(x, group, row, stride_x, group_stride_x, here, BV, ALIGN)
    if v is not None:
        u += tl.load(skip + group).to(tl.float32) * load_group_rows(
            v, group, row, stride_v, group_stride_v, here, BV, ALIGN
        )
    w = tl.load(weight + (group * V if PER_GROUP else 0) + column, column < V, 0.0).to(tl.float32)[None, :]
    if GATE is not None:
        a, _ = activate(load_group_rows(z, group, row, stride_z, group_stride_z, here, BV, ALIGN), GATE)
        if FIRST:
            u = u * a
    n, _ = normalize_rows(u, V, eps)
    n = n * w
    if GATE is not None and not FIRST:
        n = n * a
    tl.store(y + ((row * groups + group) * V)[:, None] + column[None, :], n.to(y.dtype.element_ty), here)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    dy, x, z, v, skip, weight, dx, dz, dv, dw_sums, dskip_sums, rows, steps, groups, stride_dy, group_stride_dy,
    stride_x, group_stride_x, stride_z, group_stride_z, stride_v, group_stride_v, eps,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, GATE: tl.constexpr, FIRST: tl.constexpr, PER_GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) % groups).to(tl.int64)
    tile = tl.program_id(0) // groups
    column = tl.arange(0, BV)
    w = tl.load(weight + (group * V if PER_GROUP else 0) + column, column < V, 0.0).to(tl.float32)[None, :]
    dw = tl.zeros((R, BV), tl.float32)
    if v is not None:
        D = tl.load(skip + group).to(tl.float32)
        dD = tl.zeros((R, BV), tl.float32)
    for step in range(steps):
        row = (tile * steps + step) * R + tl.arange(0, R)
        here = (row < rows)[:, None] & (column < V)[None, :]
        row = row.to(tl.int64)
        at = ((row * groups + group) * V)[:, None] + column[None, :]
        value = load_group_rows(x, group, row, stride_x, group_stride_x, here, BV, ALIGN)
        d = load_group_rows(dy, group, row, stride_dy, group_stride_dy, here, BV, ALIGN)
        if v is not None:
            skipped = load_group_rows(v, group, row, stride_v, group_stride_v, here, BV, ALIGN)
            value += D * skipped
        u = value
        if GATE is not None:
            a, da = activate(load_group_rows(z, group, row, stride_z, group_stride_z, here, BV, ALIGN), GATE)
            if FIRST:
                u = value * a
        n, r = normalize_rows(u, V, eps)
        n = tl.where(here, n, 0.0)  # with eps = 0 NaN in rows that are not there
        if GATE is not None and not FIRST:
            dw += d * n * a
            tl.store(dz + at, (d * n * w * da).to(dz.dtype.element_ty), here)
            d = d * a
        else:
            dw += d * n
        dn = d * w
        du = tl.where(here, r * (dn - n * (tl.sum(dn * n, 1) / V)[:, None]), 0.0)
        if GATE is not None and FIRST:
            tl.store(dz + at, (du * value * da).to(dz.dtype.element_ty), here)
            du = du * a
        tl.store(dx + at, du.to(dx.dtype.element_ty), here)
        if v is not None:
            tl.store(dv + at, (D * du).to(dv.dtype.element_ty), here)
            dD += du * skipped
    at_sums = (tile.to(tl.int64) * groups + group) * V
    tl.store(dw_sums + at_sums + column, tl.sum(dw, 0), column < V)
    if v is not None:
        tl.store(dskip_sums + tile.to(tl.int64) * groups + group, tl.sum(dD))


def flatten_groups(x: Tensor) -> Tensor:
    """[..., G, V] as [M, G, V], rows contiguous; a copy only where strides do not allow a view."""
    x = make_rows_contiguous(x)
    return x.flatten(0, -3) if x.ndim > 2 else x.reshape(-1, 1, x.shape[-1])


def choose_tile(width: int, numbers: int) -> tuple[int, int, int]:
    """Padded width, rows and warps of a tile with so many numbers per thread."""
    whole = padded(width, 1)
    rows = max(1, 128 * numbers // whole)
    return whole, rows, min(max(rows * whole // (32 * numbers), 1), 16)


def row_and_group_strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Those of the rows and groups of every tensor; zeros for None."""
    return tuple(stride for x in tensors for stride in ((0, 0) if x is None else x.stride()[:2]))


def forward(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    value: Tensor | None,
    skip: Tensor | None,
    activation: str,
    eps: float,
    gate_first: bool,
) -> Tensor:
    """y; nothing is checked."""
    y = x.new_empty(x.shape)
    if not y.numel():
        return y
    x, (z, v) = flatten_groups(x), (None if t is None else flatten_groups(t) for t in (gate, value))
    rows, groups, width = x.shape
    whole, tile, warps = choose_tile(width, FORWARD_NUMBERS)
    strides = row_and_group_strides(x, z, v)
    launch(
        forward_kernel, (-(-rows // tile) * groups,), x, z, v, None if skip is None else skip.contiguous(), weight.contiguous(),
        y, rows, groups, *strides, eps, V=width, BV=whole, R=tile, GATE=None if z is None else activation, FIRST=gate_first,
        PER_GROUP=weight.ndim == 2, ALIGN=alignment(width, *strides), num_warps=warps,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    value: Tensor | None,
    skip: Tensor | None,
    activation: str,
    eps: float,
    gate_first: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, gate, value and skip; None of what is not there."""
    dx = x.new_empty(x.shape)
    dz, dv = (None if t is None else t.new_empty(t.shape) for t in (gate, value))
    if not dx.numel():
        return dx, torch.zeros_like(weight), dz, dv, None if skip is None else torch.zeros_like(skip)
    dy, x = flatten_groups(dy), flatten_groups(x)
    z, v = (None if t is None else flatten_groups(t) for t in (gate, value))
    rows, groups, width = x.shape
    whole, tile, warps = choose_tile(width, BACKWARD_NUMBERS)
    steps = max(1, -(-rows // tile) * groups // ENOUGH_PROGRAMS)
    programs = -(-rows // (tile * steps))
    dw = torch.empty((programs, groups, width), device=x.device, dtype=torch.float32)
    dD = None if v is None else torch.empty((programs, groups), device=x.device, dtype=torch.float32)
    strides = row_and_group_strides(dy, x, z, v)
    launch(
        backward_kernel, (programs * groups,), dy, x, z, v, None if skip is None else skip.contiguous(), weight.contiguous(),
        dx, dz, dv, dw, dD, rows, steps, groups, *strides, eps, V=width, BV=whole, R=tile,
        GATE=None if z is None else activation, FIRST=gate_first, PER_GROUP=weight.ndim == 2, ALIGN=alignment(width, *strides),
        num_warps=warps,
    )  # fmt: skip
    dskip = None if dD is None or skip is None else sum_tiles(dD, skip.dtype)
    return dx, sum_tiles(dw if weight.ndim == 2 else dw.flatten(0, 1), weight.dtype), dz, dv, dskip
