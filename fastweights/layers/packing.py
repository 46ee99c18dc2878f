"""Sequences packed into one row, laid out as the rows of a rectangle for softmax attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.framework import sequences

__all__ = ["Rectangle", "by_length"]


def by_length(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed sequences in groups of about the same length (up to twice the shortest), so that the rectangle of a group is mostly
    full. Yields the positions of a group's tokens in the row [tokens] and the group's own cu_seqlens."""
    lengths = cu_seqlens.diff()
    for group in sequences.by_length(lengths):
        yield sequences.tokens_of(group, lengths), F.pad(lengths[group].cumsum(0), (1, 0))


class Rectangle:
    """N packed sequences as N rows of the longest one's length L, each filled up with zeros at its end.

    Attributes:
        lengths: [N], number of tokens of each row.
        valid: bool [N, L], where a row holds a token.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        self.lengths = cu_seqlens.diff()
        longest = int(self.lengths.max())
        self.valid = torch.arange(longest, device=cu_seqlens.device) < self.lengths[:, None]

    def lay_out(self, x_1T: Tensor) -> Tensor:
        """[1, T, ...] -> [N, L, ...]"""
        rows = x_1T.new_zeros(*self.valid.shape, *x_1T.shape[2:])
        rows[self.valid] = x_1T[0]
        return rows

    def pack(self, x_NL: Tensor) -> Tensor:
        """[N, L, ...] -> [1, T, ...]"""
        return x_NL[self.valid][None]
