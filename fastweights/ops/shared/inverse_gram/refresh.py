"""Adding to the inverse itself, A += refresh I, at some tokens: it ends a chunk, for G = A^-1 is then no longer a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ...framework.sequences import Chunks, Sequences
from .regularization import inverse_root

__all__ = ["RefreshChunks", "refresh_inverse"]


def refresh_inverse(G: Tensor, refresh: Tensor) -> Tensor:
    """(G^-1 + refresh I)^-1 = (I + refresh G)^-1 G for G [..., K, K] and refresh [..., 1, 1], which is constant. The gradient
    comes from a first-order term that is zero in value."""
    fixed = G.detach()
    root = inverse_root(refresh * fixed, torch.ones_like(fixed[..., 0, 0]))
    part = root.mT @ root
    return part @ fixed + part @ (G - fixed) @ part


class RefreshChunks(Chunks):
    """Chunks of at most `largest` tokens, each ending with its sequence or where `refresh` [B, T] is not zero."""

    def __init__(self, sequences: Sequences, largest: int, refresh: Tensor) -> None:
        self.shape = refresh.shape
        lengths = sequences.lengths if sequences.lengths is not None else (sequences.time,) * sequences.batch
        self.sequences = Sequences(1, refresh.numel(), lengths)
        self.device = refresh.device
        ends = (refresh.flatten().nonzero()[:, 0] + 1).tolist()[::-1]
        pieces: list[list[tuple[int, int]]] = []
        stop = 0
        for length in lengths:
            start, stop = stop, stop + length
            pieces.append([])
            while start < stop:
                while ends and ends[-1] <= start:
                    ends.pop()
                end = min(start + largest, stop, *ends[-1:])
                pieces[-1].append((start, end))
                start = end
        self.order = sorted(range(len(pieces)), key=lambda n: -len(pieces[n]))
        steps = range(max(map(len, pieces), default=0))
        self.active = [sum(len(p) > step for p in pieces) for step in steps]
        ordered = [pieces[n][step] for step in steps for n in self.order[: self.active[step]]]
        self.size = max((end - start for start, end in ordered), default=1)
        first, last = torch.tensor(ordered, dtype=torch.long).reshape(-1, 2, 1).unbind(1)
        token = first + torch.arange(self.size)
        self._place(token.where(token < last, self.sequences.time))

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return super().split(x.flatten(0, 1)[None], fill)

    def merge(self, y: Tensor) -> Tensor:
        return super().merge(y)[0].unflatten(0, self.shape)
