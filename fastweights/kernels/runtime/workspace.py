"""Placeholders of the tensors that launches will read and write, and how temporaries share one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, as torch's own allocations on a GPU


class TensorSpec:
    """Shape and dtype of a contiguous tensor that is not allocated yet. Two are the same tensor only if they are one object."""

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
        """Triton asks whether this is a multiple of 16; every tensor of a launch plan begins at one."""
        return 0

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def view_of(self, memory: Tensor, offset: int) -> Tensor:
        """This tensor at a byte offset of a tensor of bytes."""
        return memory[offset : offset + self.bytes].view(self.dtype).view(self.shape)


def assign_offsets(lifetimes: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """lifetimes: bytes, first and last launch of every temporary. The byte offset of each, such that two that live at the same
    time never overlap, and the bytes of the whole workspace: the largest first, each in the lowest gap that holds it."""
    offsets, placed = [0] * len(lifetimes), list[tuple[int, int, int, int]]()  # begin, end, first, last
    for index in sorted(range(len(lifetimes)), key=lambda n: -lifetimes[n][0]):
        size, first, last = lifetimes[index]
        size = -(-size // ALIGNMENT) * ALIGNMENT
        offset = 0
        for begin, end, other_first, other_last in sorted(placed):
            if first <= other_last and other_first <= last and end > offset:
                if begin - offset >= size:
                    break
                offset = end
        offsets[index] = offset
        placed.append((offset, offset + size, first, last))
    return offsets, max((end for _, end, *_ in placed), default=0)
