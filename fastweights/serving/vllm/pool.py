"""The states of all sequences in a pool of equal blocks of bytes, whatever tensors a layer's cache holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...layers import LayerCache

__all__ = ["Layout", "gather", "scatter"]

ALIGNMENT = 16  # bytes, the widest load of a GPU


class Place(NamedTuple):
    part: str  # "memory" or "context"
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class Layout:
    """Where the tensors of one sequence's cache lie in a block.

    Args:
        spec: the cache of one sequence, see `Mixer.state_spec`.

    Attributes:
        size: bytes of a block.
    """

    def __init__(self, spec: LayerCache) -> None:
        self.places: list[Place] = []
        self.size = 0
        for part in ("memory", "context"):
            for name, x in getattr(spec, part).items():
                self.places.append(Place(part, name, tuple(x.shape[1:]), x.dtype, self.size))
                self.size += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT

    def pools(self, blocks: Tensor) -> LayerCache:
        """Views [P, ...] of the tensors in blocks [P, size] of bytes, whose rows may lie further apart."""
        pools = LayerCache()
        for part, name, shape, dtype, offset in self.places:
            taken = torch.Size(shape).numel() * dtype.itemsize
            getattr(pools, part)[name] = blocks[:, offset : offset + taken].view(dtype).view(len(blocks), *shape)
        return pools


def gather(pools: LayerCache, rows: Tensor) -> LayerCache:
    """A cache of the sequences whose states are in these rows."""
    return _changed(pools, lambda name, pool: pool[rows])


def scatter(pools: LayerCache, rows: Tensor, cache: LayerCache) -> None:
    """Write the states of sequences into their rows."""
    for held, new in ((pools.memory, cache.memory), (pools.context, cache.context)):
        for name, pool in held.items():
            pool[rows] = new[name]


def _changed(cache: LayerCache, change: Callable[[str, Tensor], Tensor]) -> LayerCache:
    memory, context = ({name: change(name, x) for name, x in held.items()} for held in (cache.memory, cache.context))
    return LayerCache(memory, context)
