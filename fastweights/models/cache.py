"""The cache of a model: one layer cache per layer, with the interface that transformers' generate() expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor
from transformers import Cache

from ..layers import LayerCache

__all__ = ["FastWeightsCache"]


class FastWeightsCache(Cache):
    """The states of all layers after the sequences that a model has read. Its size depends on their length only where a
    layer is softmax attention.

    A memory is no list of tokens: no token can be removed from it. `crop`, and with it assisted (speculative) decoding,
    is therefore refused. To return to a prefix, keep a `copy` of the cache made after the prefix.

    Attributes:
        layers: one `LayerCache` per layer.
        columns: how many columns of the batch it has read, padding included.
    """

    layers: list[LayerCache]  # type: ignore[assignment]  # not transformers' layers, which hold keys and values

    def __init__(self, layers: list[LayerCache]) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.columns = 0

    @classmethod
    def empty(cls, num_layers: int) -> FastWeightsCache:
        return cls([LayerCache() for _ in range(num_layers)])

    def copy(self) -> FastWeightsCache:
        """An independent cache at the same point. It costs nothing: layers never write into a tensor that a cache holds."""
        copied = FastWeightsCache([LayerCache({**layer.memory}, {**layer.context}) for layer in self.layers])
        copied.columns = self.columns
        return copied

    @property
    def batch_size(self) -> int:
        """How many sequences it holds, -1 while it is empty."""
        return next((layer.count for layer in self.layers if layer.count is not None), -1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # transformers' word for "no limit"

    # generate() compiles the model by itself when a cache says that it is compileable, and then passes masks of another kind.
    is_compileable = property(lambda self: False)
    is_croppable = property(lambda self: False)
    is_initialized = property(lambda self: self.batch_size != -1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes what row beam_idx[n] was (beam search)."""
        self._apply(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """Forget everything."""
        self.layers = [LayerCache() for _ in self.layers]
        self.columns = 0

    def crop(self, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            "a FastWeightsCache cannot be cropped: no token can be removed from its memories. Decode without an "
            "assistant (no assisted, speculative or prompt-lookup decoding), or keep a copy() of the cache to return to"
        )

    activate_past_recording = crop

    def _apply(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.apply(change)
