r"""Kernel of the short convolutions over one more token, up to three of one layer in one launch: queries, keys and values.

    c = w_0 e_0 + ... + w_(W-2) e_(W-2) + w_(W-1) x + b,    s = silu(c),    y = s / sqrt(|s|^2 + eps) per head

e is the window, the W-1 inputs before x; the new one is e_1, ..., e_(W-2), x and may lie where the old one does. A program has
one head (or 128 channels) of one sequence.
"""

# mypy: disable-error-code="assignment"
# (the tuple of places grows in the kernel)

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..availability import on_device_of, rows_together
from ..chunk.tiles import padded
from ..math import sigmoid
from ..runtime.launch_plan import launch
from . import TokenConvolution

__all__ = ["convolve_token"]

MOST_PARTS = 3
CHANNELS = 128  # of a program, where there are no heads


@triton.jit
def convolve(
    x, weight, bias, window, new_window, y, row, block, stride, channels, eps,
    HEAD: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BD)
    channel = block * HEAD + lane
    inside = (lane < HEAD) & (channel < channels)
    at = row * (W - 1) * channels + channel
    new = tl.load(x + row * stride + channel, inside, 0.0)
    places, taps = (), ()
    for j in tl.static_range(W - 1):
        places = places + (tl.load(window + at + j * channels, inside, 0.0),)
    places = places + (new,)
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + channel * W + j, inside, 0.0).to(tl.float32),)
    c = tl.load(bias + channel, inside, 0.0).to(tl.float32) if bias is not None else tl.zeros((BD,), tl.float32)
    for j in tl.static_range(W):
        c += places[j].to(tl.float32) * taps[j]
    if SILU:
        c = c * sigmoid(c)
    if NORM:
        c = c * tl.rsqrt(tl.sum(c * c, 0) + eps)
    tl.store(y + row * channels + channel, c.to(y.dtype.element_ty), inside)
    tl.debug_barrier()  # the place that one thread writes is one that another may still have to read
    for j in tl.static_range(W - 1):
        tl.store(new_window + at + j * channels, places[j + 1], inside)


@triton.jit(do_not_specialize=["blocks_0", "blocks_1", "blocks_2", "eps"])
def token_convolution(
    x_0, weight_0, bias_0, window_0, new_0, y_0, stride_0, channels_0, blocks_0, HEAD_0: tl.constexpr, NORM_0: tl.constexpr,
    x_1, weight_1, bias_1, window_1, new_1, y_1, stride_1, channels_1, blocks_1, HEAD_1: tl.constexpr, NORM_1: tl.constexpr,
    x_2, weight_2, bias_2, window_2, new_2, y_2, stride_2, channels_2, blocks_2, HEAD_2: tl.constexpr, NORM_2: tl.constexpr,
    eps, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    blocks = blocks_0 + blocks_1 + blocks_2
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    if block < blocks_0:
        convolve(
            x_0, weight_0, bias_0, window_0, new_0, y_0, row, block, stride_0, channels_0, eps, HEAD_0, W, BD, NORM_0, SILU,
        )  # fmt: skip
    elif x_1 is not None:
        block -= blocks_0
        if block < blocks_1:
            convolve(
                x_1, weight_1, bias_1, window_1, new_1, y_1, row, block, stride_1, channels_1, eps, HEAD_1, W, BD, NORM_1,
                SILU,
            )  # fmt: skip
        elif x_2 is not None:
            convolve(
                x_2, weight_2, bias_2, window_2, new_2, y_2, row, block - blocks_1, stride_2, channels_2, eps, HEAD_2, W, BD,
                NORM_2, SILU,
            )  # fmt: skip


def convolve_token(
    parts: Sequence[TokenConvolution], silu: bool, eps: float, in_place: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """y [N, 1, D] and the last inputs of every part; nothing is checked. in_place: whether these replace the given ones."""
    arguments, outputs, windows, blocks, widest = [], [], [], 0, 1
    apart = len({part.window.data_ptr() for part in parts}) == len(parts)  # a shared window would be read changed
    for part in parts:
        x = rows_together(part.x)
        channels = x.shape[2]
        kept = in_place and apart and part.window.is_contiguous()
        windows.append(part.window if kept else part.window.new_empty(part.window.shape))
        outputs.append(x.new_empty(x.shape))
        head = part.head or min(CHANNELS, padded(channels, 1))
        widest, blocks = max(widest, padded(head, 1)), blocks + -(-channels // head)
        arguments += [
            x, part.weight.contiguous(), part.bias, part.window.contiguous(), windows[-1], outputs[-1], x.stride(0), channels,
            -(-channels // head), head, part.head is not None,
        ]  # fmt: skip
    for _ in range(MOST_PARTS - len(parts)):
        arguments += [None] * 6 + [0, 0, 0, 1, False]
    x = parts[0].x
    if len(x) and blocks:
        with on_device_of(x):
            launch(
                token_convolution, (len(x) * blocks,), *arguments, eps, W=parts[0].weight.shape[1], BD=widest, SILU=silu,
                num_warps=max(1, min(4, widest // 64)),
            )  # fmt: skip
    return outputs, windows
