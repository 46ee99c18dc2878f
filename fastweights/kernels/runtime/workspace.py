"""Tensors that launches will have, and how those that live side by side share one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["Buffer", "arranged"]

ALIGNMENT = 256  # bytes, as torch's own allocations on a GPU


class Buffer:
    """A tensor to be, contiguous: its memory is found when it is known which launches need it."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def data_ptr(self) -> int:
        """For Triton, which asks whether it is a multiple of 16."""
        return 0

    def tensor(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def within(self, memory: Tensor, start: int) -> Tensor:
        """As that part of a tensor of bytes."""
        return memory[start : start + self.bytes].view(self.dtype).view(self.shape)


def arranged(needs: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """needs: bytes, first and last launch of every buffer. Where each begins so that none meets another of the same time, and the
    bytes that all take: the largest first, each in the lowest gap that holds it."""
    starts, placed = [0] * len(needs), list[tuple[int, int, int, int]]()  # begin, end, first, last
    for index in sorted(range(len(needs)), key=lambda n: -needs[n][0]):
        size, first, last = needs[index]
        size = -(-size // ALIGNMENT) * ALIGNMENT
        start = 0
        for begin, end, one, other in sorted(placed):
            if first <= other and one <= last and end > start:
                if begin - start >= size:
                    break
                start = end
        starts[index] = start
        placed.append((start, start + size, first, last))
    return starts, max((end for _, end, *_ in placed), default=0)
