"""The cache of a model: one layer cache a layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers import LayerCache

__all__ = ["FastWeightsCache"]


@dataclass
class FastWeightsCache:
    """What a model remembers of the sequences that it has read; its size depends on their length only where a layer is
    softmax attention.

    Attributes:
        layers: one cache a layer.
    """

    layers: list[LayerCache]

    @classmethod
    def empty(cls, num_layers: int) -> FastWeightsCache:
        return cls([LayerCache() for _ in range(num_layers)])
