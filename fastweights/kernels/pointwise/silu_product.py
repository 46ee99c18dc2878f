r"""Kernels of the product of SwiGLU: each pass reads every number once, and the backward needs only the inputs.

y = silu(z) u        dz = dy u silu'(z)        du = dy silu(z)

A program has a tile of R rows and BV columns. Rows may lie apart, as those of the two halves of a joint projection do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..runtime.launch_plan import alignment, launch
from .gated_norm import activate, known_multiple, load_rows
from .residual_norm import flatten_rows

TILE, WARPS = 2048, 8  # numbers and warps of a program
COLUMNS = 256, 1024  # of a tile: at least, where the rows have as many, and at most


@triton.jit(do_not_specialize=["rows"])
def silu_product_forward(
    z, u, y, rows, stride_z, stride_u, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr
):
    row, first, here = locate_tile(rows, V, BV, R)
    a, _ = activate(load_rows(z + first, row, stride_z, here, BV, ALIGN), "silu")
    found = a * load_rows(u + first, row, stride_u, here, BV, ALIGN)
    tl.store(y + (row * V)[:, None] + (first + tl.arange(0, BV))[None, :], found.to(y.dtype.element_ty), here)


@triton.jit(do_not_specialize=["rows"])
def silu_product_backward(
    dy, z, u, dz, du, rows, stride_dy, stride_z, stride_u, stride_dz, stride_du,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row, first, here = locate_tile(rows, V, BV, R)
    a, da = activate(load_rows(z + first, row, stride_z, here, BV, ALIGN), "silu")
    d = load_rows(dy + first, row, stride_dy, here, BV, ALIGN)
    of_z = d * load_rows(u + first, row, stride_u, here, BV, ALIGN) * da
    column = (first + tl.arange(0, BV))[None, :]
    tl.store(dz + (row * known_multiple(stride_dz, ALIGN))[:, None] + column, of_z.to(dz.dtype.element_ty), here)
    tl.store(du + (row * known_multiple(stride_du, ALIGN))[:, None] + column, (d * a).to(du.dtype.element_ty), here)


@triton.jit
def locate_tile(rows, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr):
    """The rows [R] of a program's tile, its first column, and which of its numbers are there."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    row = (tl.program_id(0) // BLOCKS).to(tl.int64) * R + tl.arange(0, R)
    first = tl.program_id(0) % BLOCKS * BV
    return row, first, (row < rows)[:, None] & (first + tl.arange(0, BV) < V)[None, :]


def choose_tile(rows: int, width: int) -> tuple[int, dict[str, int]]:
    """Number of programs, and the sizes that are compiled in."""
    least, most = COLUMNS
    columns = max(math.gcd(width, most), min(padded(width, 1), least))
    tall = max(1, TILE // columns)
    return -(-rows // tall) * -(-width // columns), {"V": width, "BV": columns, "R": tall}


def rows_of(*tensors: Tensor) -> list[Tensor]:
    return [x for x in map(flatten_rows, tensors) if x is not None]


def forward(z: Tensor, u: Tensor) -> Tensor:
    """y, for z and u of at least one dimension; nothing is checked."""
    made = u.new_empty(u.shape)
    if made.numel():
        z, u, y = rows_of(z, u, made)
        programs, sizes = choose_tile(*u.shape)
        strides = z.stride(0), u.stride(0)
        align = alignment(u.shape[1], *strides)
        launch(silu_product_forward, (programs,), z, u, y, len(u), *strides, **sizes, ALIGN=align, num_warps=WARPS)
    return made


def backward(dy: Tensor, z: Tensor, u: Tensor, into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of z and u, written `into` tensors whose rows may lie apart, where these are given."""
    dz, du = (z.new_empty(z.shape), u.new_empty(u.shape)) if into is None else into
    if dz.numel():
        tensors = rows_of(dy, z, u, dz, du)
        rows, width = tensors[0].shape
        programs, sizes = choose_tile(rows, width)
        strides = [x.stride(0) for x in tensors]
        launch(
            silu_product_backward, (programs,), *tensors, rows, *strides, **sizes, ALIGN=alignment(width, *strides),
            num_warps=WARPS,
        )  # fmt: skip
    return dz, du
