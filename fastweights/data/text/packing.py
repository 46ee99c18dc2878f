"""Rows of one length cut from a stream of documents, and packed rows in which no document sees another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...checks import check_size, describe_value
from ...kinds import checked
from .shards import TokenShards

__all__ = ["PackedRows", "ShuffledRows", "pack_rows"]

IGNORED = -100  # the label that transformers' losses leave out

Row = tuple[np.ndarray, np.ndarray]


@checked
class PackedRows:
    """A stream of tokens cut into rows of `length` tokens. Tokens after the last whole row are left out.

    Row i has two parts: its tokens, int64 [length], and the positions in the row where a document starts, int64. The first
    position is always 0, the start of the row.
    """

    def __init__(self, shards: TokenShards, length: int) -> None:
        if not isinstance(shards, TokenShards):
            raise TypeError(f"shards must be TokenShards, got {describe_value(shards)}")
        if len(shards) < check_size("length", length):
            raise ValueError(
                f"{shards.split} text must have at least one row of length {length}, got {len(shards)} tokens; "
                "pass more text, a shorter length or, for held-out text, a larger held_out_fraction or files in held_out"
            )
        self.shards, self.length = shards, length

    def __len__(self) -> int:
        return len(self.shards) // self.length

    def __getitem__(self, row: int) -> Row:
        begin, end = row * self.length, (row + 1) * self.length
        inside = np.searchsorted(self.shards.starts, [begin + 1, end])
        starts = np.asarray(self.shards.starts[slice(*inside)]) - begin
        return self.shards.tokens(begin, end), np.concatenate([np.zeros(1, np.int64), starts])


class ShuffledRows(torch.utils.data.Dataset[Row]):
    """`count` rows in an order that depends on the seed alone: every pass over the rows has another permutation.

    Step s of a training with n rows per step reads rows s n ... (s + 1) n - 1, also after a restart.
    """

    def __init__(self, rows: PackedRows, *, seed: int, count: int) -> None:
        self.rows, self.seed, self.count = rows, seed, count
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        run, place = divmod(index, len(self.rows))
        if run not in self._orders:
            self._orders = {run: self._order(run)}
        return self.rows[int(self._orders[run][place])]

    def _order(self, run: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=[self.seed, run])).permutation(len(self.rows))


@checked
def pack_rows(rows: Sequence[Row]) -> dict[str, Tensor]:
    """B rows of T tokens as one packed row, the form that the models take.

    Returns:
        input_ids: int64 [1, B T].
        labels: int64 [1, B T], the same tokens, with -100 at the first token of every sequence, which no token predicts.
        cu_seqlens: int32 [N+1], where sequences start and end. A sequence is a document, or the part of it in a row.
    """
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    if not all(isinstance(row, tuple) and len(row) == 2 for row in rows):
        raise TypeError("rows must be pairs of tokens and document starts, as PackedRows gives them")
    tokens = torch.from_numpy(np.concatenate([ids for ids, _ in rows]))
    ends = np.cumsum([len(ids) for ids, _ in rows])
    starts = np.concatenate([starts + end - len(ids) for (ids, starts), end in zip(rows, ends, strict=True)])
    labels = tokens.clone()
    labels[torch.from_numpy(starts)] = IGNORED
    cu_seqlens = torch.from_numpy(np.append(starts, len(tokens)).astype(np.int32))
    return {"input_ids": tokens[None], "labels": labels[None], "cu_seqlens": cu_seqlens}
