"""Prompts that are padded at their end, read as if they were padded in front: each is then continued from its last token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import own_columns

__all__ = ["padding_in_front"]


def padding_in_front(input_ids: Tensor, inputs: dict[str, Any], new: int) -> tuple[Tensor, dict[str, Any]]:
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
        inputs["position_ids"] = _with_columns(position_BS, last_BN)
    moved = {name: _with_columns(x, front_BN) for name, x in given.items()}
    return _with_columns(input_ids, front_BN), {**inputs, **moved}


def _with_columns(x_BS: Tensor, column_BN: Tensor) -> Tensor:
    """x [B, S, ...] whose last N columns are these ones of them; x as it is where it has fewer, as ids beside embeddings."""
    new = column_BN.shape[1]
    if x_BS.shape[1] < new:
        return x_BS
    row_B1 = torch.arange(len(x_BS), device=x_BS.device)[:, None]
    chosen = own_columns(x_BS, new)[row_B1, column_BN.to(x_BS.device)]
    return torch.cat([x_BS[:, : x_BS.shape[1] - new], chosen], 1)
