"""From a whole batch to one rank's part of its tokens, and back: for losses and measures of a user's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checks import check_dense, check_size, check_tensor, describe_value, shape_of
from ..models import divided_rows
from ..models.divided_rows import DividedRows
from .parallel import ranks_of

__all__ = ["gather_tokens", "own_tokens", "sum_over_ranks"]


def own_tokens(x: Tensor, group: Any, *, filling: int | None = None, **descriptions: Tensor | None) -> Tensor:
    """The part of a whole batch that this rank's logits and hidden states belong to.

    Args:
        x: [B, T, ...], one entry per token, such as shifted labels.
        group: as for `context_parallel`.
        filling: the number that stands behind the last token, where the tokens do not divide by the ranks; repetitions of the
            last entry when None.
        descriptions: attention_mask, position_ids, cu_seqlens and seq_idx, as the model gets them.

    Returns:
        [1, part, ...], without padding.

    Raises:
        TypeError: x is no tensor, or group no process group.
        ValueError: x has no batch and time, or a description does not fit.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor [B, T, ...], got {describe_value(x)}; convert it with torch.as_tensor")
    check_dense("x", x)
    if x.ndim < 2 or not x.numel():
        raise ValueError(f"x must be [B, T, ...] with at least one token, got shape {shape_of(x)}")
    return DividedRows(ranks_of(group), x.shape, x.device, **descriptions).pack(x, filling)


def gather_tokens(x: Tensor, group: Any, *, batch: int, time: int, **descriptions: Tensor | None) -> Tensor:
    """The hidden states or logits of all ranks, in the places of their tokens. Its gradient follows the convention of
    `sum_over_ranks`.

    Args:
        x: [1, part, D], of this rank.
        group: as for `context_parallel`.
        batch, time: B and T of the whole batch.
        descriptions: attention_mask, position_ids, cu_seqlens and seq_idx, as the model got them.

    Returns:
        [B, T, D] on every rank, zero at padding.

    Raises:
        TypeError: x is no tensor, or group no process group.
        ValueError: x is not the part of such a batch, or a description does not fit.
    """
    check_tensor("x", x)
    check_size("batch", batch)
    check_size("time", time)
    rows = DividedRows(ranks_of(group), (batch, time), x.device, **descriptions)
    if x.ndim != 3 or x.shape[:2] != (1, rows.share):
        raise ValueError(
            f"x must be [1, {rows.share}, D], this rank's part of {rows.tokens} tokens, got {shape_of(x)}; pass the batch and "
            "the descriptions that the model got"
        )
    return rows.unpack(x)


def sum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """The sum of x over the ranks, on every rank, added in the order of ranks.

    A loss that every rank sums up of its own tokens, divided by their number in the whole batch, becomes the whole mean. When all
    ranks call backward on it, each x gets N times its gradient, so that the mean of the gradients over the ranks is right.
    """
    check_tensor("x", x)
    return divided_rows.sum_over_ranks(x, ranks_of(group))
