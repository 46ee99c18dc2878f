r"""Kernels of Palimpsa's gates: each pass reads every number once, and the backward needs only the inputs.

    w = s v        beta = c sigmoid(z)        s, c: one number per head

    dv = s dw      ds = sum dw v              dz = c dbeta sigma (1 - sigma)      dc = sum dbeta sigma,   sigma = sigmoid(z)

Where no gradient is needed, the forward also takes c as softplus(b) s, with one number b per head for all rows, or multiplies a
second tensor z with s, or divides v by s in place of w: the steps of decoding then have one launch here. A program takes a tile
of R rows of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.math import sigmoid, softplus
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import alignment, launch
from .gated_norm import choose_tile, flatten_groups, load_group_rows, row_and_group_strides

FORWARD_NUMBERS, BACKWARD_NUMBERS = 16, 8  # numbers of an input per thread
VARYING = ["rows"]  # a single row gets no kernel of its own


@triton.jit
def locate_rows(rows, groups, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr):
    """The group of a program, its rows, where their numbers lie in contiguous tensors, and which exist."""
    group = (tl.program_id(0) % groups).to(tl.int64)
    row = (tl.program_id(0) // groups).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, BV)
    here = (row < rows)[:, None] & (column < V)[None, :]
    return group, row, ((row * groups + group) * V)[:, None] + column[None, :], here


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    v, s, z, c, b, write, beta, rows, groups, stride_v, group_stride_v, stride_z, group_stride_z,
    LEAST: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """With z, beta is c sigmoid(z), softplus(b) s sigmoid(z), or s z where neither c nor b is given. With LEAST, v is divided by
    s, or by LEAST where s is below it."""
    wait_for_inputs(OVERLAP)
    group, row, at, here = locate_rows(rows, groups, V, BV, R)
    value = load_group_rows(v, group, row, stride_v, group_stride_v, here, BV, ALIGN)
    gate = tl.load(s + row * groups + group, row < rows, 0.0).to(tl.float32)[:, None]
    if LEAST is not None:
        gate = 1 / tl.where(gate < LEAST, LEAST, gate)  # NaN where s is NaN
    tl.store(write + at, (value * gate).to(write.dtype.element_ty), here)
    if z is not None:
        share = load_group_rows(z, group, row, stride_z, group_stride_z, here, BV, ALIGN)
        if c is not None:
            gate = tl.load(c + row * groups + group, row < rows, 0.0).to(tl.float32)[:, None]
        elif b is not None:
            gate *= softplus(tl.load(b + group).to(tl.float32))
        if c is not None or b is not None:
            share = sigmoid(share)
        tl.store(beta + at, (share * gate).to(beta.dtype.element_ty), here)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    dwrite, dbeta, v, s, z, c, dv, ds, dz, dc, rows, groups,
    stride_dw, group_stride_dw, stride_db, group_stride_db, stride_v, group_stride_v, stride_z, group_stride_z,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    group, row, at, here = locate_rows(rows, groups, V, BV, R)
    head_place = row * groups + group
    value = load_group_rows(v, group, row, stride_v, group_stride_v, here, BV, ALIGN)
    d = load_group_rows(dwrite, group, row, stride_dw, group_stride_dw, here, BV, ALIGN)
    gate = tl.load(s + head_place, row < rows, 0.0).to(tl.float32)[:, None]
    tl.store(dv + at, (d * gate).to(dv.dtype.element_ty), here)
    tl.store(ds + head_place, tl.sum(d * value, 1).to(ds.dtype.element_ty), row < rows)
    if z is not None:
        share = sigmoid(load_group_rows(z, group, row, stride_z, group_stride_z, here, BV, ALIGN))
        d = load_group_rows(dbeta, group, row, stride_db, group_stride_db, here, BV, ALIGN) * share
        scale = tl.load(c + head_place, row < rows, 0.0).to(tl.float32)[:, None]
        tl.store(dz + at, (d * (1 - share) * scale).to(dz.dtype.element_ty), here)
        tl.store(dc + head_place, tl.sum(d, 1).to(dc.dtype.element_ty), row < rows)


def forward(
    v: Tensor, s: Tensor, z: Tensor | None, c: Tensor | None, b: Tensor | None = None, least: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """w and beta, None without z; nothing is checked. c, b, least: see `forward_kernel`."""
    write, beta = v.new_empty(v.shape), None if z is None else v.new_empty(v.shape)
    if not v.numel():
        return write, beta
    v, z = flatten_groups(v), None if z is None else flatten_groups(z)
    rows, groups, width = v.shape
    whole, tile, warps = choose_tile(width, FORWARD_NUMBERS)
    strides = row_and_group_strides(v, z)
    launch(
        forward_kernel, (-(-rows // tile) * groups,), v, s.contiguous(), z, None if c is None else c.contiguous(),
        None if b is None else b.contiguous(), write, beta, rows, groups, *strides,
        LEAST=least, V=width, BV=whole, R=tile, ALIGN=alignment(width, *strides), num_warps=warps,
    )  # fmt: skip
    return write, beta


def backward(
    dwrite: Tensor, dbeta: Tensor | None, v: Tensor, s: Tensor, z: Tensor | None, c: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of v, s, z and c."""
    dv, ds = v.new_empty(v.shape), s.new_empty(s.shape)
    dz, dc = (None, None) if z is None or c is None else (z.new_empty(z.shape), c.new_empty(c.shape))
    if not v.numel():
        return dv, ds.zero_(), dz, None if dc is None else dc.zero_()
    dwrite, v = flatten_groups(dwrite), flatten_groups(v)
    dbeta, z = (None if x is None else flatten_groups(x) for x in (dbeta, z))
    rows, groups, width = v.shape
    whole, tile, warps = choose_tile(width, BACKWARD_NUMBERS)
    strides = row_and_group_strides(dwrite, dbeta, v, z)
    launch(
        backward_kernel, (-(-rows // tile) * groups,),
        dwrite, dbeta, v, s.contiguous(), z, None if c is None else c.contiguous(), dv, ds, dz, dc, rows, groups, *strides,
        V=width, BV=whole, R=tile, ALIGN=alignment(width, *strides), num_warps=warps,
    )  # fmt: skip
    return dv, ds, dz, dc
