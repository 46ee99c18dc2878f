"""Sequences packed into one row, laid out as the rows of a rectangle for softmax attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.authoring import group_by_length, locate_tokens

__all__ = ["Rectangle", "split_by_length"]


def split_by_length(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed sequences in groups of about the same length (up to twice the shortest), so that the rectangle of a group is mostly
    full. Yields the positions of a group's tokens in the row [tokens] and the group's own cu_seqlens."""
    lengths = cu_seqlens.diff()
    for group in group_by_length(lengths):
        yield locate_tokens(group, lengths), F.pad(lengths[group].cumsum(0), (1, 0))


class Rectangle:
    """N packed sequences of a row of T tokens as N rows of the longest one's length L, each filled up with zeros at its end. A
    traced graph knows no length as a Python number: there L is T.

    Attributes:
        lengths: [N], number of tokens of each row.
        width: L.
    """

    def __init__(self, cu_seqlens: Tensor, time: int) -> None:
        self.lengths, self._time = cu_seqlens.diff(), time
        self.width = time if torch.compiler.is_compiling() else int(self.lengths.max())
        place_L = torch.arange(self.width, device=cu_seqlens.device)
        token_NL = (cu_seqlens[:-1, None] + place_L).where(
            place_L < self.lengths[:, None], time
        )  # T where there is none
        self._token = token_NL.flatten().long()

    def lay_out(self, x_1T: Tensor) -> Tensor:
        """[1, T, ...] -> [N, L, ...]"""
        filled = torch.cat([x_1T[0], x_1T.new_zeros(1, *x_1T.shape[2:])])
        return filled.index_select(0, self._token).unflatten(0, (len(self.lengths), self.width))

    def pack(self, x_NL: Tensor) -> Tensor:
        """[N, L, ...] -> [1, T, ...]"""
        row = x_NL.new_zeros(self._time + 1, *x_NL.shape[2:]).index_copy(0, self._token, x_NL.flatten(0, 1))
        return row[None, : self._time]
