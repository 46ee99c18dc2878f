"""The part that one rank has of a batch, with context parallelism, and of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import shape_of
from ..ops.context_parallel.agreement import find_differences, gather_objects
from ..ops.context_parallel.collectives import all_gather
from ..ops.context_parallel.documents import begin_row
from ..ops.context_parallel.group import ContextParallel
from .loss import IGNORED, next_labels
from .rows import Rows

__all__ = ["DividedRows", "check_same_batch", "sum_over_ranks"]

LEAST_TOKENS = 8  # of a rank: a short convolution reads its last inputs from the rank before, and from no other


class DividedRows(Rows):
    """The sequences of a batch [B, T], laid end to end in a single row that is cut into equal parts of consecutive tokens, one
    per rank. The last token is repeated until the parts are equal and not too short; no token before it sees these repetitions.

    Args:
        cp: the ranks.
        shape, device: of the batch, [B, T, ...].
        descriptions: of `Rows`: attention_mask, position_ids, cu_seqlens and seq_idx.

    Attributes:
        cu_seqlens: cumulative lengths of the sequences of the whole row; None where it is one sequence.
        tokens: number of tokens of the row, without those that fill it up.
        share: number of tokens of each rank.
    """

    def __init__(
        self, cp: ContextParallel, shape: Sequence[int], device: torch.device, /, **descriptions: Tensor | None
    ) -> None:
        batch, time = shape[:2]
        super().__init__(batch, time, **descriptions)
        self.cp = cp
        self.tokens = batch * time if self._tokens is None else int(self._tokens.sum())
        self.share = max(-(-self.tokens // cp.size), LEAST_TOKENS) if self.tokens else 0
        self._missing = cp.size * self.share - self.tokens
        if self.cu_seqlens is None and batch > 1:
            self.cu_seqlens = torch.arange(batch + 1, device=device) * time
        if self.cu_seqlens is not None and self._missing:
            self.cu_seqlens = F.pad(self.cu_seqlens[:-1], (0, 1), value=cp.size * self.share)
        if self.cu_seqlens is not None:
            self.cu_seqlens = begin_row(self.cu_seqlens)

    def pack(self, x_BTD: Tensor, filling: int | None = None) -> Tensor:
        """This rank's part [1, share, ...] of a tensor [B, T, ...]. filling: the number that fills the row up, in place of the
        last token."""
        x_1TD = x_BTD.flatten(0, 1)[None] if self._tokens is None else super().pack(x_BTD)
        if self._missing:
            last = x_1TD[:, -1:] if filling is None else torch.full_like(x_1TD[:, -1:], filling)
            x_1TD = torch.cat([x_1TD, last.expand(1, self._missing, *x_1TD.shape[2:])], 1)
        return x_1TD.narrow(1, self.cp.rank * self.share, self.share)

    def unpack(self, x_1TD: Tensor) -> Tensor:
        """The inverse of pack: [B, T, D] of the parts [1, share, D] of all ranks, on every rank; zero at padding."""
        row_1TD = all_gather(x_1TD[0], self.cp).flatten(0, 1)[None, : self.tokens]
        return row_1TD[0].unflatten(0, (self.batch, self.time)) if self._tokens is None else super().unpack(row_1TD)

    def divide_loss(self, labels_BT: Tensor, num_items_in_batch: int | Tensor | None) -> dict[str, Any]:
        """Arguments of a loss function for this rank's logits: the labels of its tokens, shifted before the row is cut, and the
        number that the losses of all ranks are divided by."""
        next_BT = next_labels(labels_BT)
        own = self.pack(next_BT, filling=IGNORED)
        count = (next_BT != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"labels": own, "shift_labels": own, "num_items_in_batch": count}


def check_same_batch(cp: ContextParallel, tokens: Tensor) -> None:
    """ValueError, on every rank, unless all ranks have the same ids, or embeddings of one shape. Waits for a GPU."""
    own: dict[str, Any] = {"shape": shape_of(tokens)}
    if not tokens.is_floating_point():
        own["checksum"] = int((tokens.flatten() * torch.arange(1, tokens.numel() + 1, device=tokens.device)).sum())
    for name, what in find_differences(gather_objects(own, cp, tokens)).items():
        raise ValueError(
            f"input_ids or inputs_embeds must be the same whole batch on every rank of the group, got {name} {what}; give all "
            "ranks of a group the rows that one of them would read alone"
        )


def sum_over_ranks(x: Tensor, cp: ContextParallel) -> Tensor:
    """The sum of x over the ranks, on every rank. When every rank calls backward on it, each x gets the gradient `size` times:
    the mean of the parameters' gradients over the ranks is then the gradient."""
    return all_gather(x, cp).sum(0)
