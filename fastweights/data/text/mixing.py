"""Rows of several sources in proportion to their weights. Seed and position decide which source a row comes from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .packing import Row, ShuffledRows

__all__ = ["MixedRows", "Mixture"]

BLOCK = 1000  # rows in which the shares are exact


class Mixture:
    """The source of every row of a training. Each source has the same number of rows in every block of 1000 rows; their order
    differs from block to block.

    Raises:
        ValueError: a weight of less than a thousandth of all, which would give no row.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * BLOCK
        counts = np.floor(shares).astype(np.int64)
        counts[np.argsort(counts - shares, kind="stable")[: BLOCK - counts.sum()]] += 1  # the largest remainders
        if not counts.all():
            raise ValueError(
                f"weight of every source must be at least a thousandth of all, got {min(weights):g} of {sum(weights):g}; leave "
                "that source out, or raise its weight"
            )
        self.counts, self._seed = counts, seed
        self._block = -1
        self._order = self._rank = np.zeros(0, np.int64)

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and the number of earlier rows from this source."""
        block, within = divmod(row, BLOCK)
        if block != self._block:
            order = np.repeat(np.arange(len(self.counts)), self.counts)
            random = np.random.Generator(np.random.Philox(key=[self._seed, block]))
            self._order, self._block = random.permutation(order), block
            self._rank = np.empty(BLOCK, np.int64)
            for source, count in enumerate(self.counts):
                self._rank[self._order == source] = np.arange(count)
        source = int(self._order[within])
        return source, block * int(self.counts[source]) + int(self._rank[within])

    def rows_before(self, row: int) -> list[int]:
        """For each source, the number of its rows before this row."""
        block, within = divmod(row, BLOCK)
        self.place(row)
        inside = np.bincount(self._order[:within], minlength=len(self.counts))
        return (block * self.counts + inside).tolist()


class MixedRows(torch.utils.data.Dataset[Row]):
    """`count` rows of shuffled sources, beginning with row `first` of the mixture."""

    def __init__(self, sources: Sequence[ShuffledRows], mixture: Mixture, *, first: int, count: int) -> None:
        self.sources, self.mixture, self.first, self.count = sources, mixture, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        source, place = self.mixture.place(self.first + index)
        return self.sources[source][place]
