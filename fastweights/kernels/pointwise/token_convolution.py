r"""Kernel of the short convolutions over one more token, or a few whose windows are all kept, up to three of one layer in one
launch: queries, keys and values.

    c = w_0 e_0 + ... + w_(W-2) e_(W-2) + w_(W-1) x + b,    s = silu(c),    y = s / sqrt(|s|^2 + eps) per head

e is the window, the W-1 inputs before x; the new one is e_1, ..., e_(W-2), x and may lie where the old one does. A program has
one head (or 128 channels) of one sequence. The windows may be rows of pools. Two convolutions that share a window then also
share a program, because a program of the other one could read the window after it is changed.
"""

# mypy: disable-error-code="assignment"
# (the tuple of places grows in the kernel)

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import sigmoid
from ..common.overlap import FETCHED, prefetch_lines, wait_for_inputs
from ..common.packing import pool_row, tokens_of_sequence
from ..common.rows import rows_per_sequence
from ..runtime.launch_plan import launch, make_rows_contiguous
from . import TokenConvolution

MOST_PARTS = 3
CHANNELS = 128  # of a program, where there are no heads


@triton.jit
def convolve(
    x, weight, bias, window, new_window, y, other_weight, other_bias, other_y, row, block, stride, channels, eps,
    rows, P, step, cu_seqlens, T,
    HEAD: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """row: the sequence. other_weight: of a second convolution with the same input and window, None where there is none."""
    TOKENS: tl.constexpr = ROWS - 1 if ROWS > 1 else 1
    lane = tl.arange(0, BD)
    channel = block * HEAD + lane
    inside = (lane < HEAD) & (channel < channels)
    taps = load_taps(weight, channel, inside, W)
    if OVERLAP and rows is None and tl.num_programs(0) <= FETCHED:
        for j in tl.static_range(W - 1):
            prefetch_lines(window + (row * (W - 1) + j) * channels + tl.minimum(channel, channels - 1))
    wait_for_inputs(OVERLAP)
    if rows is None:
        at, held = row * (W - 1) * channels + channel, inside
    else:
        index, exists = pool_row(rows, row * ROWS, P)
        at, held = index * step + channel, inside & exists
    if ROWS == 1:
        first, count = row, 1
    else:
        first, count = tokens_of_sequence(cu_seqlens, row, T)
    places = ()
    for j in tl.static_range(W - 1):
        places = places + (tl.load(window + at + j * channels, held, 0.0),)
    for t in tl.static_range(TOKENS):
        places = places + (tl.load(x + (first + t) * stride + channel, inside & (t < count), 0.0),)
    store_answers(places, taps, bias, y, first, count, channel, inside, channels, eps, W, BD, NORM, SILU, TOKENS)
    if other_weight is not None:
        taps = load_taps(other_weight, channel, inside, W)
        store_answers(
            places, taps, other_bias, other_y, first, count, channel, inside, channels, eps, W, BD, NORM, SILU, TOKENS
        )  # fmt: skip
    tl.debug_barrier()  # the place that one thread writes is one that another may still have to read
    for t in tl.static_range(TOKENS):
        if ROWS > 1:
            index, exists = pool_row(rows, row * ROWS + 1 + t, P)
            at, kept = index * step + channel, held & exists & (t < count)
        else:
            kept = held
        for j in tl.static_range(W - 1):
            tl.store(new_window + at + j * channels, places[t + j + 1], kept)


@triton.jit
def load_taps(weight, channel, inside, W: tl.constexpr):
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + channel * W + j, inside, 0.0).to(tl.float32),)
    return taps


@triton.jit
def store_answers(
    places, taps, bias, y, first, count, channel, inside, channels, eps,
    W: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """places: the window and the inputs of TOKENS tokens from `first` on, of which there are `count`."""
    for t in tl.static_range(TOKENS):
        c = tl.load(bias + channel, inside, 0.0).to(tl.float32) if bias is not None else tl.zeros((BD,), tl.float32)
        for j in tl.static_range(W):
            c += places[t + j].to(tl.float32) * taps[j]
        if SILU:
            c = c * sigmoid(c)
        if NORM:
            c = c * tl.rsqrt(tl.sum(c * c, 0) + eps)
        tl.store(y + (first + t) * channels + channel, c.to(y.dtype.element_ty), inside & (t < count))


@triton.jit(
    do_not_specialize=["blocks_0", "blocks_1", "blocks_2", "eps", "P", "T"],
    do_not_specialize_on_alignment=["rows", "cu_seqlens"],
)
def token_convolution(
    x_0, weight_0, bias_0, window_0, new_0, y_0, stride_0, channels_0, blocks_0, HEAD_0: tl.constexpr, NORM_0: tl.constexpr,
    x_1, weight_1, bias_1, window_1, new_1, y_1, stride_1, channels_1, blocks_1, HEAD_1: tl.constexpr, NORM_1: tl.constexpr,
    x_2, weight_2, bias_2, window_2, new_2, y_2, stride_2, channels_2, blocks_2, HEAD_2: tl.constexpr, NORM_2: tl.constexpr,
    eps, rows, P, step_0, step_1, step_2, cu_seqlens, T,
    W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """rows: of the sequences in pools of P windows, which lie step_i numbers apart; a negative one is none. ROWS: how many each
    sequence has, 1, or 1 + S as in `RecurrentCall`. SHARED: the second convolution has the input and window of the first one,
    and no blocks of its own."""
    blocks = blocks_0 + blocks_1 + blocks_2
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    if SHARED:
        convolve(
            x_0, weight_0, bias_0, window_0, new_0, y_0, weight_1, bias_1, y_1, row, block, stride_0, channels_0, eps, rows, P,
            step_0, cu_seqlens, T, HEAD_0, W, BD, NORM_0, SILU, ROWS, OVERLAP,
        )  # fmt: skip
    elif block < blocks_0:
        convolve(
            x_0, weight_0, bias_0, window_0, new_0, y_0, None, None, None, row, block, stride_0, channels_0, eps, rows, P,
            step_0, cu_seqlens, T, HEAD_0, W, BD, NORM_0, SILU, ROWS, OVERLAP,
        )  # fmt: skip
    elif x_1 is not None:
        block -= blocks_0
        if block < blocks_1:
            convolve(
                x_1, weight_1, bias_1, window_1, new_1, y_1, None, None, None, row, block, stride_1, channels_1, eps, rows, P,
                step_1, cu_seqlens, T, HEAD_1, W, BD, NORM_1, SILU, ROWS, OVERLAP,
            )  # fmt: skip
        elif x_2 is not None:
            convolve(
                x_2, weight_2, bias_2, window_2, new_2, y_2, None, None, None, row, block - blocks_1, stride_2, channels_2, eps,
                rows, P, step_2, cu_seqlens, T, HEAD_2, W, BD, NORM_2, SILU, ROWS, OVERLAP,
            )  # fmt: skip


def alike(parts: Sequence[TokenConvolution]) -> bool:
    """Whether these are two convolutions of one input, so that a program may compute both."""
    return len(parts) == 2 and parts[0].head == parts[1].head and parts[0].x.data_ptr() == parts[1].x.data_ptr()


def convolve_token(
    parts: Sequence[TokenConvolution], silu: bool, eps: float, in_place: bool, rows: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """y and the last inputs of every part; nothing is checked. in_place: whether these replace the given ones, as they do in
    pools [P, W-1, D], where the sequences have these rows."""
    arguments, outputs, windows, steps, blocks, widest = [], [], [], [], 0, 1
    apart = len({part.window.data_ptr() for part in parts}) == len(parts)  # a shared window would be read changed
    shared = not apart and (rows is not None or (in_place and alike(parts)))
    for place, part in enumerate(parts):
        x = make_tokens_regular(part.x)
        channels = x.shape[2]
        kept = rows is not None or (in_place and (apart or shared) and part.window.is_contiguous())
        windows.append(part.window if kept else part.window.new_empty(part.window.shape))
        steps.append(None if rows is None else part.window.stride(0))
        outputs.append(x.new_empty(x.shape))
        head = part.head or min(CHANNELS, padded(channels, 1))
        own = 0 if shared and place else -(-channels // head)
        widest, blocks = max(widest, padded(head, 1)), blocks + own
        arguments += [
            x, part.weight.contiguous(), part.bias, windows[-1] if kept else part.window.contiguous(), windows[-1],
            outputs[-1], x.stride(0 if x.shape[1] == 1 else 1), channels, own, head, part.head is not None,
        ]  # fmt: skip
    for _ in range(MOST_PARTS - len(parts)):
        arguments += [None] * 6 + [0, 0, 0, 1, False]
        steps.append(None)
    x, rows = parts[0].x, None if rows is None else rows.contiguous()
    count, pool = (len(x), None) if rows is None else (len(rows), len(parts[0].window))
    launch(
        token_convolution, (count * blocks,), *arguments, eps, rows, pool, *steps, cu_seqlens, x.shape[1],
        W=parts[0].weight.shape[1], BD=widest, SILU=silu, SHARED=shared,
        ROWS=rows_per_sequence(rows), num_warps=max(1, min(4, widest // 64)),
    )  # fmt: skip
    return outputs, windows


def make_tokens_regular(x: Tensor) -> Tensor:
    """x [N, T, D] with channels side by side and the same stride between all tokens."""
    x = make_rows_contiguous(x)
    return x if 1 in x.shape[:2] or x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()
