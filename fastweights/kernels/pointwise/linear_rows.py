r"""Kernel of linear maps of a few rows, as decoding has them, with what stands around them. It is bound by reading the weights.

    plain:    y = x W^T + b
    add:      y = residual + x W^T
    swiglu:   y = silu(x W^T) (x U^T)
    sigmoid:  y = largest exp(rate) sigmoid(x W^T + b), float32; one rate, up to 44, for a group of outputs, or 0
    decay:    y = -exp(A_log) softplus(x W^T + b), float32; one A_log for a group of outputs, of which what is above 44 is
              added to the sum: exp does not overflow, and the decay stays the same
    logsigmoid: y = largest log(sigmoid(x W^T + b)), float32
    forget:   y = exp(decay), float32
    tanh:     y = tanh(x W^T + b)

One launch computes several products, each of its own kind: of the same x, or each of its own x, whose widths may differ. It may
compute x itself as the RMSNorm of a residual stream and a branch (`residual_norm`), as that of heads with a gate (`gated_norm`),
or as a LayerNorm (`layer_norm`).

One or two rows: a warp has one output, reads its weights before it waits for x, multiplies without tensor cores and adds up in
itself. The norm is computed by every warp. More rows: a program owns 32 outputs of all rows, or 16 where that makes few programs,
and multiplies by tensor cores; the norm is a launch of its own. The order of the sums does not depend on the number of rows, so a
row gets the same bits alone and beside another one, and the same bits among any more.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (tuples begin empty in the kernel)

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
from . import FEW_ROWS, Normed, Product, RowProducts, gated_norm, layer_norm, residual_norm
from .row_blocks import (
    activate_blocks,
    add_blocks,
    center_blocks,
    load_blocks,
    load_repeated,
    multiply_blocks,
    normalize_blocks,
    round_blocks,
    scale_blocks,
    store_blocks,
)

MOST_PRODUCTS = 8  # of a launch
WARP_BYTES = 512  # that the lanes of a warp load at once
MOST_BLOCKS = 32  # of so many bytes of weights, which a warp keeps in registers
FEW_WARPS = 4
OUTPUTS, WARPS, MOST_STAGES = 32, 4, 4  # of a program, for more rows
NARROW = 2048  # outputs of a launch up to which a program has half of OUTPUTS
INPUTS = {2: 128, 4: 32}  # in a step of each of its two sums, by bytes of a number: float32 needs more registers
LINE = 128  # bytes of a line of the GPU's cache
# Bytes of shared memory: of Hopper and Blackwell in data centers, by compute capability; what every GPU from Ampere on has.
MUCH_SHARED, SHARED = {(9, 0): 192 * 1024, (10, 0): 192 * 1024}, 96 * 1024
IN_FLOAT32 = ("sigmoid", "decay", "forget", "logsigmoid")  # results
NO_PRODUCT = (None, None, None, None, 0, 0, 1, 1.0)  # arguments of one that is not there


@triton.jit
def add_products(x_rows, w_rows, k, is_row, is_output, D, BK: tl.constexpr, sums):
    """sums plus those of the inputs from k on."""
    lane = tl.arange(0, BK)[None, :]
    a = tl.load(x_rows + k + lane, is_row & (k + lane < D), 0.0)
    b = tl.load(w_rows + k + lane, is_output & (k + lane < D), 0.0)
    return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit
def finish(
    z, bias, other, largest, y, residual, row, rows, output, width, KINDS: tl.constexpr, PLACE: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store what follows the products z of some rows [., 1] and outputs [1, .]. bias, other: of the outputs, in float32."""
    if HAS_BIAS:
        if KINDS[PLACE] != "plain":
            z = z.to(DTYPE).to(tl.float32)
        z += bias
    at = row.to(tl.int64) * width + output
    here = (row < rows) & (output < width)
    if KINDS[PLACE] == "add":
        z = z.to(DTYPE).to(tl.float32) + tl.load(residual + at, here, 0.0).to(tl.float32)
    elif KINDS[PLACE] == "sigmoid":
        log_rate, _ = log_rate_and_rest(other)
        z = largest * tl.exp(log_rate) * sigmoid(z if HAS_BIAS else z.to(DTYPE).to(tl.float32))
    elif KINDS[PLACE] == "decay" or KINDS[PLACE] == "forget":
        log_rate, rest = log_rate_and_rest(other)
        z = -tl.exp(log_rate) * softplus(z + rest)
        if KINDS[PLACE] == "forget":
            z = tl.exp(z)
    elif KINDS[PLACE] == "logsigmoid":
        z = -largest * softplus(-(z if HAS_BIAS else z.to(DTYPE).to(tl.float32)))
    elif KINDS[PLACE] == "tanh":
        z = 2 * sigmoid(2 * z) - 1
    tl.store(y + at, z.to(y.dtype.element_ty), here)


VARYING = [f"{name}_{i}" for name in ("width", "first", "group", "largest") for i in range(MOST_PRODUCTS)]


@triton.jit(do_not_specialize=["rows", "eps", *VARYING])
def linear_rows_kernel(
    x, x_1, x_2, x_3, x_4, x_5, x_6, x_7, branch, gate, value, skip, norm, shift, s, n, more, rows, stride_x, stride_branch,
    stride_gate, stride_value, eps,
    w_0, bias_0, other_0, y_0, width_0, first_0, group_0, largest_0,
    w_1, bias_1, other_1, y_1, width_1, first_1, group_1, largest_1,
    w_2, bias_2, other_2, y_2, width_2, first_2, group_2, largest_2,
    w_3, bias_3, other_3, y_3, width_3, first_3, group_3, largest_3,
    w_4, bias_4, other_4, y_4, width_4, first_4, group_4, largest_4,
    w_5, bias_5, other_5, y_5, width_5, first_5, group_5, largest_5,
    w_6, bias_6, other_6, y_6, width_6, first_6, group_6, largest_6,
    w_7, bias_7, other_7, y_7, width_7, first_7, group_7, largest_7,
    KINDS: tl.constexpr, DEPTHS: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, NORMS: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """norm: weight [NORMS] of an RMSNorm over groups of V numbers of x, or of x plus the branch, whose sum is s; n is the norm,
    where it is kept. shift: the bias [D] of a LayerNorm, whose V is D. gate, value, skip: as in the gated norm; SPAN: channels
    that a number of skip serves. more: the second matrix of "swiglu". other_i: the residual, a rate or A_log. first_i: the first
    program of a product. x_i, DEPTHS: the inputs of the other products and the widths of all, up to D; None where all share x."""
    weights = w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7
    biases = bias_0, bias_1, bias_2, bias_3, bias_4, bias_5, bias_6, bias_7
    others = other_0, other_1, other_2, other_3, other_4, other_5, other_6, other_7
    results = y_0, y_1, y_2, y_3, y_4, y_5, y_6, y_7
    widths = width_0, width_1, width_2, width_3, width_4, width_5, width_6, width_7
    firsts = first_0, first_1, first_2, first_3, first_4, first_5, first_6, first_7
    groups = group_0, group_1, group_2, group_3, group_4, group_5, group_6, group_7
    largests = largest_0, largest_1, largest_2, largest_3, largest_4, largest_5, largest_6, largest_7
    inputs = x, x_1, x_2, x_3, x_4, x_5, x_6, x_7
    program = tl.program_id(0)
    which, w, width, first, depth = 0, w_0, width_0, 0, D if DEPTHS is None else DEPTHS[0]
    for i in tl.static_range(1, len(KINDS)):
        if program >= firsts[i]:
            which, w, width, first = i, weights[i], widths[i], firsts[i]
            if DEPTHS is not None:
                x, depth = inputs[i], DEPTHS[i]
    if DEPTHS is not None:
        stride_x = depth
    output = (program - first) * BN + tl.arange(0, BN)
    is_output = output < width
    # What follows a product is read before it, as it depends on no kernel but for a residual.
    bias, other = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for i in tl.static_range(len(KINDS)):
        if biases[i] is not None or (others[i] is not None and KINDS[i] != "add"):  # noqa: SIM102  # Triton folds this condition while it compiles
            if which == i:
                if biases[i] is not None:
                    bias = tl.load(biases[i] + output, is_output, 0.0).to(tl.float32)
                if others[i] is not None and KINDS[i] != "add":
                    other = tl.load(others[i] + output // groups[i], is_output, 0.0).to(tl.float32)
    w_at = output.to(tl.int64)[:, None] * depth
    if FEW:
        blocks = load_blocks(w, w_at, is_output[:, None], D, BK, depth)
        if KINDS[0] == "swiglu":
            more_blocks = load_blocks(more, w_at, is_output[:, None], D, BK)
        same = tl.zeros((BN, 1), tl.int32)
        if norm is not None:
            norm_blocks = load_repeated(norm, NORMS, 1, D, BN, BK)
        if shift is not None:
            shift_blocks = load_repeated(shift, D, 1, D, BN, BK)
        if skip is not None:
            skip_blocks = load_repeated(skip, D // SPAN, SPAN, D, BN, BK)
        wait_for_inputs(OVERLAP)
        writes = (program == 0) & (tl.arange(0, BN) == 0)[:, None]
        # All are read before anything is written: their latencies overlap.
        streams, branches, gates, values = (), (), (), ()
        for r in tl.static_range(BM):
            exists, at = (same + r) < rows, same.to(tl.int64) + r
            streams = streams + (load_blocks(x, at * stride_x, exists, D, BK, depth),)
            if branch is not None:
                branches = branches + (load_blocks(branch, at * stride_branch, exists, D, BK),)
            if gate is not None:
                gates = gates + (load_blocks(gate, at * stride_gate, exists, D, BK),)
            if skip is not None:
                values = values + (load_blocks(value, at * stride_value, exists, D, BK),)
        for r in tl.static_range(BM):
            exists, at = (same + r) < rows, same.to(tl.int64) + r
            row = streams[r]
            if branch is not None:
                row = round_blocks(add_blocks(row, branches[r]), x.dtype.element_ty)
                store_blocks(s, at * D, writes & exists, row, D, BK)
            if skip is not None:
                row = add_blocks(row, scale_blocks(skip_blocks, values[r]))
            if gate is not None and GATE_FIRST:
                row = scale_blocks(row, activate_blocks(gates[r], GATE))
            if shift is not None:
                row = center_blocks(row, D, BN, BK)
            if norm is not None:
                row = scale_blocks(normalize_blocks(row, eps, D, V, BN, BK), norm_blocks)
                if shift is not None:
                    row = add_blocks(row, shift_blocks)
                if gate is not None and not GATE_FIRST:
                    row = scale_blocks(row, activate_blocks(gates[r], GATE))
                row = round_blocks(row, x.dtype.element_ty)
            if n is not None:
                store_blocks(n, at * D, writes & exists, row, D, BK)
            z = multiply_blocks(row, blocks, BN, BK)
            if KINDS[0] == "swiglu":
                z = z * sigmoid(z) * multiply_blocks(row, more_blocks, BN, BK)
            for i in tl.static_range(len(KINDS)):
                if which == i:
                    finish(
                        z, bias[None, :], other[None, :], largests[i], results[i], others[i], tl.full((1, 1), r, tl.int32), rows,
                        output[None, :], width, KINDS, i, biases[i] is not None, x.dtype.element_ty,
                    )  # fmt: skip
    else:
        if OVERLAP:
            prefetch_matrix(w, output, width, depth, LINES)
            if KINDS[0] == "swiglu":
                prefetch_matrix(more, output, width, D, LINES)
        wait_for_inputs(OVERLAP)
        row = tl.arange(0, BM)[:, None]
        x_rows = x + row.to(tl.int64) * stride_x
        z, u = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        if KINDS[0] == "swiglu":
            for k in range(0, D, BK):
                z = add_products(x_rows, w + w_at, k, row < rows, is_output[:, None], D, BK, z)
                u = add_products(x_rows, more + w_at, k, row < rows, is_output[:, None], D, BK, u)
            z = z * sigmoid(z) * u
        else:  # two sums of alternate blocks, which do not wait for each other
            for k in range(0, depth, 2 * BK):
                z = add_products(x_rows, w + w_at, k, row < rows, is_output[:, None], depth, BK, z)
                u = add_products(x_rows, w + w_at, k + BK, row < rows, is_output[:, None], depth, BK, u)
            z += u
        for i in tl.static_range(len(KINDS)):
            if which == i:
                finish(
                    z, bias[None, :], other[None, :], largests[i], results[i], others[i], row, rows, output[None, :], width,
                    KINDS, i, biases[i] is not None, x.dtype.element_ty,
                )  # fmt: skip


def multiply_rows(
    x: Tensor | Sequence[Tensor], products: Sequence[Product], normed: Normed | None = None
) -> RowProducts:
    """The results [..., width] for x [..., D] of few rows, or one x for each product; nothing is checked."""
    apart: list[Tensor] = []
    if not isinstance(x, Tensor):
        apart = [one.contiguous() for one in x]
        x = apart[0]
    flat = rows_of(x)
    assert flat is not None
    rows, channels = len(flat), max(one.shape[-1] for one in apart or [x])
    lanes = WARP_BYTES // x.element_size()
    few = rows <= FEW_ROWS and -(-channels // lanes) * (1 + (products[0].more is not None)) <= MOST_BLOCKS
    s = n = None
    if normed is not None and not (few and fits_blocks(normed, channels, lanes)):
        s, n = normalize(x, normed)
        flat, normed = n.flatten(0, -2), None
    elif normed is not None and normed.is_kept:
        s, n = None if normed.branch is None else x.new_empty(x.shape), x.new_empty(x.shape)
    given = [None] * 3 if normed is None else [rows_of(one) for one in (normed.branch, normed.gate, normed.value)]
    parameters = (
        [None] * 3 if normed is None else [contiguous(one) for one in (normed.skip, normed.weight, normed.shift)]
    )
    outputs, arguments, programs = [], [], 0
    tall = padded(rows, 1) if few else max(16, padded(rows, 1))
    tile, warps = (FEW_WARPS, FEW_WARPS) if few else (OUTPUTS, WARPS)
    if not few and sum(len(product.weight) for product in products) <= NARROW:
        tile //= 2
    for weight, kind, bias, other, largest, _, rounds in products:
        width = len(weight)
        y = x.new_empty(*x.shape[:-1], width, dtype=torch.float32 if kind in IN_FLOAT32 and not rounds else x.dtype)
        outputs.append(y)
        arguments += [
            weight.contiguous(), bias, None if other is None else other.contiguous(), y, width, programs,
            1 if other is None or not other.numel() else max(width // other.numel(), 1), float(largest),
        ]  # fmt: skip
        programs += -(-width // tile)
    inputs = lanes if few else INPUTS[x.element_size()]
    # bytes; one stage less than there are is loaded ahead
    step_bytes = 2 * (tall + tile) * inputs * x.element_size()
    grid = (programs,)
    others = [*apart[1:], *[None] * MOST_PRODUCTS][: MOST_PRODUCTS - 1]
    if rows and programs:
        launch(
            linear_rows_kernel, grid, flat, *others, *given, *parameters, s, n, contiguous(products[0].more), rows,
            flat.stride(0), *[0 if one is None else one.stride(0) for one in given], 0.0 if normed is None else normed.eps,
            *arguments, *NO_PRODUCT * (MOST_PRODUCTS - len(products)),
            KINDS=tuple(product.kind for product in products), DEPTHS=tuple(one.shape[-1] for one in apart) or None,
            GATE=None if normed is None or normed.gate is None else normed.activation,
            GATE_FIRST=normed is not None and normed.gate_first,
            D=channels, V=channels if normed is None else normed.width or channels,
            NORMS=1 if normed is None else normed.weight.numel(),
            SPAN=1 if normed is None or normed.skip is None else channels // len(normed.skip), FEW=few, BM=tall, BN=tile,
            BK=min(inputs, padded(channels, 16)) if few else inputs,
            LINES=1 if few else padded(-(-channels * x.element_size() // LINE), 1), num_warps=warps,
            num_stages=1 if few else min(1 + shared_memory(x.device) // step_bytes, MOST_STAGES),
        )  # fmt: skip
    return RowProducts(outputs, s, n if normed is None or normed.is_kept else None)


def shared_memory(device: torch.device) -> int:
    return MUCH_SHARED.get(torch.cuda.get_device_capability(device), SHARED) if device.type == "cuda" else SHARED


def rows_of(x: Tensor | None) -> Tensor | None:
    """[..., D] as [M, D]."""
    return None if x is None else make_rows_contiguous(x).flatten(0, -2)


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def fits_blocks(normed: Normed, channels: int, lanes: int) -> bool:
    """Whether the sums of a norm lie within the blocks of a row."""
    width = normed.width
    return width is None or width == channels or width % lanes == 0 or (lanes % width == 0 and channels % width == 0)


def normalize(x: Tensor, normed: Normed) -> tuple[Tensor | None, Tensor]:
    """The sum and the norm by a launch of their own."""
    if normed.is_kept:
        return residual_norm.forward(x, normed.branch, normed.weight, normed.eps, 0.0, x.dtype)
    if normed.shift is not None:
        return None, layer_norm.layer_norm(x, normed.weight, normed.shift, normed.eps)
    value, skip = normed.value, normed.skip
    if value is not None and skip is not None and x.shape[-1] != len(skip) * (normed.width or 0):
        heads, given = (y.unflatten(-1, (len(skip), -1)) for y in (x, value))
        x, value, skip = torch.addcmul(heads, skip[:, None].to(x.dtype), given).flatten(-2), None, None
    x, gate, value = (None if y is None else y.unflatten(-1, (-1, normed.width)) for y in (x, normed.gate, value))
    n = gated_norm.forward(x, normed.weight, gate, value, skip, normed.activation, normed.eps, normed.gate_first)
    return None, n.flatten(-2)
