"""The states of all sequences in a pool of equal blocks of bytes, whatever tensors a layer's cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...layers import LayerCache, Mixer

__all__ = ["Layout", "PooledMixer"]

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


class PooledMixer:
    """A mixer whose sequences have their states in rows of a pool of blocks. Row 0 belongs to no sequence: vLLM gives it to the
    padding of a step, and it stays as it is.

    Args:
        mixer: the layer.
        blocks: [P, size] bytes, see `Layout`.
    """

    def __init__(self, mixer: Mixer, blocks: Tensor) -> None:
        self.mixer = mixer
        self.pools = Layout(mixer.state_spec()).pools(blocks)
        self.first = mixer.initial_state(1)

    def decode(self, x_ND: Tensor, rows: Tensor) -> Tensor:
        """One token more [N, D] of sequences that have states. Where the layer can, it works in the pool itself."""
        in_pool = self.mixer.decodes_in_pool
        cache = LayerCache(context=_taken(self.pools.context, rows))
        if in_pool:
            cache.memory, cache.rows = dict(self.pools.memory), torch.where(rows > 0, rows, -1)
        else:
            cache.memory = _taken(self.pools.memory, rows)
        y_ND = self.mixer(x_ND[:, None], cache)[:, 0]
        _put(self.pools.context, rows, cache.context)
        if not in_pool:
            _put(self.pools.memory, rows, cache.memory)
        return y_ND

    def prefill(self, x_TD: Tensor, rows: Tensor, started: Tensor, edges: Tensor) -> Tensor:
        """Tokens [T, D] of sequences that lie one after another. started [N]: which of them have states; edges: [N+1]."""
        cache = LayerCache(_taken(self.pools.memory, rows), _taken(self.pools.context, rows))
        for held, first in ((cache.memory, self.first.memory), (cache.context, self.first.context)):
            for name, state in held.items():
                held[name] = torch.where(_like(started, state), state, first[name])
        y_TD = self.mixer(x_TD[None], cache, edges)[0]
        _put(self.pools.memory, rows, cache.memory)
        _put(self.pools.context, rows, cache.context)
        return y_TD


def _taken(pools: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: pool[rows] for name, pool in pools.items()}


def _put(pools: Mapping[str, Tensor], rows: Tensor, states: Mapping[str, Tensor]) -> None:
    """Write states into their rows. Row 0 receives its own numbers, which needs no wait for the device."""
    for name, pool in pools.items():
        pool[rows] = torch.where(_like(rows > 0, pool), states[name], pool[:1])


def _like(x_N: Tensor, states: Tensor) -> Tensor:
    return x_N.view(-1, *[1] * (states.ndim - 1))
