"""How many tokens of a prompt generate() reads at a time: all of them where the device's memory allows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..layers.softmax_attention import SoftmaxAttention

__all__ = ["largest_block", "prefill_block", "token_bytes"]

CPU_BLOCK = 512  # keeps a core busy
SMALLEST = 64  # the chunk of most memories
SHARE = 0.5  # of the free memory; the rest is for errors of the estimate, the allocator's gaps and the decoding after the prompt
# Without gradients the tensors of one layer are alive at a time. In forwards of every mixer on a CPU, with heads of up to 128
# channels, these were at most 12 times as wide as all projections of a mixer together, or as the MLP where that is wider.
TENSORS = 12
# Grouped queries with a mask go through torch's plain attention: scores, masked scores and weights, in float32.
SCORES = 3 * 4


def prefill_block(model: Any, rows: int, length: int) -> int:
    """How many tokens of each of `rows` prompts, padded to `length`, are read at a time."""
    free = free_memory(model.device)
    if free is None:
        return CPU_BLOCK
    # The keys and values of softmax layers stay, however a prompt is read.
    kept = rows * model.state_size(length) * model.dtype.itemsize
    return largest_block(
        length,
        room=SHARE * (free - kept),
        bytes_whole=rows * token_bytes(model, length, whole=True),
        bytes_in_block=rows * token_bytes(model, length, whole=False),
    )


def largest_block(length: int, *, room: float, bytes_whole: int, bytes_in_block: int) -> int:
    """`length` where so many tokens fit into `room` bytes. Otherwise the largest SMALLEST * 2^n that fits, or SMALLEST.

    bytes_whole, bytes_in_block: bytes per token of a prompt that is read in one pass, and of one that is read in blocks.
    """
    if length * bytes_whole <= room:
        return length
    fitting = max(int(room) // bytes_in_block, SMALLEST)
    return SMALLEST * 2 ** ((fitting // SMALLEST).bit_length() - 1)


def token_bytes(model: Any, length: int, *, whole: bool) -> int:
    """Estimate of the bytes that a layer takes per token of a prompt of `length`, read in one pass (whole) or in blocks."""
    blocks, itemsize = model.model.layers, model.dtype.itemsize
    projected = (sum(m.out_features for m in block.mixer.modules() if isinstance(m, nn.Linear)) for block in blocks)
    widest = max(*projected, model.config.intermediate_size)
    masks = (_mask_bytes(m, length, whole, itemsize) for m in blocks.modules() if isinstance(m, SoftmaxAttention))
    return TENSORS * widest * itemsize + max(masks, default=0)


def _mask_bytes(layer: SoftmaxAttention, length: int, whole: bool, itemsize: int) -> int:
    """Bytes per query that torch's attention takes for a mask over the slots which the query may see. Without a window a prompt
    that is read in one pass needs no mask."""
    blocks_alone = 0 if whole else length
    slots = blocks_alone if layer.window is None else min(length, 2 * layer.window)
    heads = layer.options.num_heads
    return slots * (heads * SCORES if layer.num_kv_heads < heads else 1 + itemsize)


def free_memory(device: torch.device) -> int | None:
    """Bytes that torch could still use on a GPU, those included that its allocator holds; None elsewhere."""
    if device.type != "cuda":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
