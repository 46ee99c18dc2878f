"""How generate() reads prompts. Padding at the end of a prompt is moved to its front, because a prompt is continued from its
last token. The memory of the device decides how many tokens are read at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.softmax_attention import SoftmaxAttention
from ..private_torch import all_modules
from .rows import own_columns

__all__ = ["largest_block", "move_padding_to_front", "prefill_block", "token_bytes"]


def move_padding_to_front(input_ids: Tensor, inputs: dict[str, Any], new: int) -> tuple[Tensor, dict[str, Any]]:
    """Prompts whose padding at the end is moved to the beginning of their last `new` columns, which no cache has read.

    Args:
        input_ids: [B, S], empty where embeddings are given.
        inputs: the other arguments of the model in generate(), attention_mask among them. position_ids are changed in it:
            padding at the end gets the position of the last token, from which generate() counts on.

    Returns:
        The ids and the other arguments with the padding in front.
    """
    own = own_columns(inputs["attention_mask"], new) != 0
    padding_B = own.flip(1).long().argmax(1)  # columns after the last token
    if not padding_B.any():
        return input_ids, inputs
    column_N = torch.arange(new, device=own.device)
    front_BN = (column_N - padding_B[:, None]) % new
    names = ("attention_mask", "inputs_embeds", "position_ids")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if "position_ids" in given:  # one row for all is allowed
        given["position_ids"] = position_BS = given["position_ids"].expand(len(own), -1)
        last_BN = column_N.minimum(new - 1 - padding_B[:, None])
        inputs["position_ids"] = _take_columns(position_BS, last_BN)
    moved = {name: _take_columns(x, front_BN) for name, x in given.items()}
    return _take_columns(input_ids, front_BN), {**inputs, **moved}


def _take_columns(x_BS: Tensor, column_BN: Tensor) -> Tensor:
    """x [B, S, ...] with its last N columns replaced by those that `column_BN` numbers among them. x itself where it has fewer
    columns: the ids beside embeddings."""
    new = column_BN.shape[1]
    if x_BS.shape[1] < new:
        return x_BS
    row_B1 = torch.arange(len(x_BS), device=x_BS.device)[:, None]
    chosen = own_columns(x_BS, new)[row_B1, column_BN.to(x_BS.device)]
    return torch.cat([x_BS[:, : x_BS.shape[1] - new], chosen], 1)


CPU_BLOCK = 512  # keeps a core busy
SMALLEST = 64  # the chunk of most memories
SHARE = 0.5  # of the free memory; the rest is for errors of the estimate, the allocator's gaps and the decoding after the prompt
# Without gradients the tensors of one layer are alive at a time. In forwards of every mixer on a CPU, with heads of up to 128
# channels, these were at most 12 times as wide as all projections of a mixer together, or as the MLP where that is wider.
TENSORS = 12
# Grouped queries with a mask go through torch's plain attention: scores, masked scores and weights, in float32.
SCORES = 3 * 4


def prefill_block(model: Any, rows: int, length: int) -> int:
    """How many tokens of each prompt are read at a time. There are `rows` prompts, padded to `length`."""
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
    """`length` where that many tokens fit into `room` bytes; otherwise the largest SMALLEST * 2^n that fits, at least SMALLEST.

    bytes_whole, bytes_in_block: bytes per token of a prompt that is read in one pass, and of one that is read in blocks.
    """
    if length * bytes_whole <= room:
        return length
    fitting = max(int(room) // bytes_in_block, SMALLEST)
    return SMALLEST * 2 ** ((fitting // SMALLEST).bit_length() - 1)


def token_bytes(model: Any, length: int, *, whole: bool) -> int:
    """Estimate of the bytes that a layer takes per token of a prompt of `length`, read in one pass (whole) or in blocks."""
    blocks, itemsize = model.model.layers, model.dtype.itemsize
    mixers = [all_modules(block.mixer) for block in blocks]
    projected = (sum(m.out_features for m in modules if isinstance(m, nn.Linear)) for modules in mixers)
    widest = max(*projected, model.config.intermediate_size)
    masks = (
        _count_mask_bytes(m, length, whole, itemsize)
        for modules in mixers
        for m in modules
        if isinstance(m, SoftmaxAttention)
    )
    return TENSORS * widest * itemsize + max(masks, default=0)


def _count_mask_bytes(layer: SoftmaxAttention, length: int, whole: bool, itemsize: int) -> int:
    """Bytes per query of the mask that torch's attention needs, over the slots that the query may see. A prompt that is read in
    one pass needs no mask without a window."""
    blocks_alone = 0 if whole else length
    slots = blocks_alone if layer.window is None else min(length, 2 * layer.window)
    heads = layer.options.num_heads
    return slots * (heads * SCORES if layer.num_kv_heads < heads else 1 + itemsize)


def free_memory(device: torch.device) -> int | None:
    """Bytes that torch can still use on a GPU, including free memory that its allocator holds; None on other devices."""
    if device.type != "cuda":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
