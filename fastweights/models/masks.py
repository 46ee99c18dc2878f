"""Attention masks of two dimensions: padding, and the numbers of documents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_dense, shape_of

__all__ = ["check_mask", "check_prompts", "document_numbers", "own_columns"]


def check_mask(attention_mask: object, batch: int, time: int) -> None:
    """A mask [B, T] or longer. Its numbers are not looked at."""
    wanted = f"attention_mask must be [{batch}, at least {time}], 1 for tokens and 0 for padding"
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"{wanted}, got {type(attention_mask).__name__}; convert it with torch.tensor")
    check_dense("attention_mask", attention_mask)
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < time:
        raise ValueError(f"{wanted}, got shape {shape_of(attention_mask)}")


def own_columns(x_BS: Tensor, time: int) -> Tensor:
    """The last T columns, those of the input; the ones before stand for what a cache has read."""
    return x_BS[:, x_BS.shape[1] - time :]


def document_numbers(attention_mask: Tensor, batch: int, time: int) -> Tensor | None:
    """Of a mask [B, S] of the input's T columns and those that a cache has read before them.

    A GPU is waited for once, whatever the mask holds.

    Returns:
        None where the input has no padding and every row is one document; bool [B, T], where it has tokens, without numbers of
        documents; int64 [B, S] with them, the number of each token's document and 0 for padding.

    Raises:
        ValueError: a mask of another shape, or of other numbers.
        TypeError: no tensor.
    """
    check_mask(attention_mask, batch, time)
    low, high, own_low = _read_extremes(attention_mask, time)
    if own_low == 1 == high or low == high > 0:
        return None
    return own_columns(attention_mask, time).bool() if high <= 1 else attention_mask.long()


def check_prompts(attention_mask: Tensor, batch: int, time: int) -> None:
    """A mask of prompts to be continued, of whose last T columns each row has a token."""
    numbers = document_numbers(attention_mask, batch, time)
    if (attention_mask > 1).any():  # one number too: generate() gives new tokens the number 1
        raise ValueError(
            "attention_mask must be 1 for tokens and 0 for padding in generate(), which continues every row, got numbers of "
            "documents; pass each document as a row of its own, with a mask of ones"
        )
    if numbers is None:
        return
    empty = (~numbers.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(
            f"attention_mask must show at least one token of every prompt, got none in row {empty[0]}; leave empty prompts out, "
            "or begin them with a token for the start of a text"
        )


def _read_extremes(mask_BS: Tensor, time: int) -> tuple[float, float, float]:
    """The smallest and the largest number, and the smallest of the last T columns; 1 without any."""
    wanted = "attention_mask must be 0 for padding, and for tokens 1 or the whole number above 0 of their document"
    if mask_BS.is_complex() or mask_BS.is_quantized:
        raise ValueError(f"{wanted}, got {mask_BS.dtype}; pass bool, integers or floats")
    if mask_BS.device.type == "meta":
        raise ValueError(f"{wanted}, got a tensor on meta; pass numbers")
    if not mask_BS.numel():
        return 1, 1, 1
    ends = [*torch.aminmax(mask_BS), own_columns(mask_BS, time).amin()]
    if mask_BS.is_floating_point():
        ends.append((mask_BS != mask_BS.floor()).any())
    low, high, own_low, *fractions = torch.stack([x.double() for x in ends]).tolist()  # the only wait for a GPU
    if not 0 <= low <= high < math.inf or any(fractions):
        raise ValueError(
            f"{wanted}, got values from {low:g} to {high:g}; an additive mask, 0 for tokens and a large negative number for "
            "padding, becomes one with (attention_mask == 0).long()"
        )
    return low, high, own_low
