r"""Kernel of linear maps of a few rows, as decoding has them, with what follows them. It is bound by reading the weights.

    plain:    y_i = x W_i^T + b for up to three matrices of one x (queries, keys and values)
    add:      y = residual + x W^T
    swiglu:   y = silu(x W_0^T) (x W_1^T)
    sigmoid:  y = largest sigmoid(x W^T + b), float32
    decay:    y = -exp(A_log) softplus(x W^T + b), float32; one A_log for a group of outputs, of which what is above 44 is
              added to the sum: exp does not overflow, and the decay stays the same

A program owns BN outputs of all rows. The order of the sums does not depend on the number of rows, so a row gets the same bits
alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import log_rate_and_rest, sigmoid, softplus
from ..common.overlap import prefetch_matrix, wait_for_inputs
from ..runtime.launch_plan import launch, make_rows_contiguous

MOST_MATRICES = 3
OUTPUTS, WARPS, MOST_STAGES = 32, 4, 4  # of a program
INPUTS = {2: 128, 4: 32}  # in a step of each of its two sums, by bytes of a number: float32 needs more registers
LINE = 128  # bytes of a line of the GPU's cache
SHARED = 96 * 1024  # bytes of shared memory, which every GPU from Ampere on has


@triton.jit
def add_products(x_rows, w_rows, k, is_row, is_output, D: tl.constexpr, BK: tl.constexpr, sums):
    """sums plus those of the inputs from k on."""
    lane = tl.arange(0, BK)[None, :]
    a = tl.load(x_rows + k + lane, is_row & (k + lane < D), 0.0)
    b = tl.load(w_rows + k + lane, is_output & (k + lane < D), 0.0)
    return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "tiles_0", "tiles_1", "width_0", "width_1", "width_2", "group", "largest"])
def linear_rows_kernel(
    x, w_0, w_1, w_2, bias, other, y_0, y_1, y_2, rows, stride_x, width_0, width_1, width_2, tiles_0, tiles_1, group, largest,
    KIND: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """other: the residual, or A_log."""
    tile = tl.program_id(0)
    w, y, width = w_0, y_0, width_0
    if COUNT > 1 and KIND == "plain":  # noqa: SIM102  # Triton folds this condition while it compiles
        if tile >= tiles_0:
            tile, w, y, width = tile - tiles_0, w_1, y_1, width_1
            if COUNT > 2:  # noqa: SIM102
                if tile >= tiles_1:
                    tile, w, y, width = tile - tiles_1, w_2, y_2, width_2
    row, output = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    if OVERLAP:
        prefetch_matrix(w, output, width, D, LINES)
        if KIND == "swiglu":
            prefetch_matrix(w_1, output, width, D, LINES)
    wait_for_inputs(OVERLAP)
    is_row, is_output = (row < rows)[:, None], (output < width)[:, None]
    x_rows = x + row.to(tl.int64)[:, None] * stride_x
    w_at = output.to(tl.int64)[:, None] * D
    z, u = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    if KIND == "swiglu":
        for k in range(0, D, BK):
            z = add_products(x_rows, w + w_at, k, is_row, is_output, D, BK, z)
            u = add_products(x_rows, w_1 + w_at, k, is_row, is_output, D, BK, u)
        z = z * sigmoid(z) * u
    else:  # two sums of alternate blocks, which do not wait for each other
        for k in range(0, D, 2 * BK):
            z = add_products(x_rows, w + w_at, k, is_row, is_output, D, BK, z)
            u = add_products(x_rows, w + w_at, k + BK, is_row, is_output, D, BK, u)
        z += u
    if bias is not None:
        if KIND != "plain":
            z = z.to(x.dtype.element_ty).to(tl.float32)
        z += tl.load(bias + output, output < width, 0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * width + output[None, :]
    here = is_row & (output < width)[None, :]
    if KIND == "add":
        z = z.to(x.dtype.element_ty).to(tl.float32) + tl.load(other + at, here, 0.0).to(tl.float32)
    elif KIND == "sigmoid":
        z = largest * sigmoid(z.to(x.dtype.element_ty).to(tl.float32) if bias is None else z)
    elif KIND == "decay":
        log_rate, rest = log_rate_and_rest(tl.load(other + output // group, output < width, 0.0))
        z = -tl.exp(log_rate)[None, :] * softplus(z + rest[None, :])
    tl.store(y + at, z.to(y.dtype.element_ty), here)


def linear_rows(
    x: Tensor, weights: Sequence[Tensor], kind: str, bias: Tensor | None, other: Tensor | None, largest: float
) -> list[Tensor]:
    """The results [..., width] for x [..., D] of few rows; nothing is checked."""
    flat = make_rows_contiguous(x).flatten(0, -2)
    rows, channels = flat.shape
    given = [w.contiguous() for w in weights]
    widths = [len(w) for w in given]
    in_float32 = kind in ("sigmoid", "decay")
    made = widths if kind == "plain" else widths[:1]
    outputs = [x.new_empty(*x.shape[:-1], width, dtype=torch.float32 if in_float32 else x.dtype) for width in made]
    tiles = [-(-width // OUTPUTS) for width in made]
    missing = [None] * (MOST_MATRICES - len(given))
    tall = max(16, padded(rows, 1))
    inputs = INPUTS[x.element_size()]
    step_bytes = (
        2 * (tall + OUTPUTS) * inputs * x.element_size()
    )  # bytes; one stage less than there are is loaded ahead
    if rows and sum(tiles):
        launch(
            linear_rows_kernel, (sum(tiles),), flat, *given, *missing, bias, None if other is None else other.contiguous(),
            *outputs, *[None] * (MOST_MATRICES - len(outputs)), rows, flat.stride(0), *(widths + [0, 0])[:MOST_MATRICES],
            *(tiles + [0])[:2], 1 if other is None or not other.numel() else max(widths[0] // other.numel(), 1), largest,
            KIND=kind, COUNT=len(given), D=channels, BM=tall, BN=OUTPUTS, BK=inputs,
            LINES=padded(-(-channels * x.element_size() // LINE), 1), num_warps=WARPS,
            num_stages=min(1 + SHARED // step_bytes, MOST_STAGES),
        )  # fmt: skip
    return outputs
