"""The cache of a hybrid: keys and values where attention was kept, and the memories of the other layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ...layers import LayerCache
from ..recording import RecordingCache

__all__ = ["HybridCache", "MemoryCacheLayer", "attention_state_size", "check_hybrid_cache"]


class MemoryCacheLayer(CacheLayerMixin):
    """The memory of one layer, as one of the layers of a cache of transformers.

    Attributes:
        held: the memory and the last inputs of convolutions.
        columns: how many columns of the batch the layer has read, padding included.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.held, self.columns = LayerCache(), 0

    def read(self, columns: int) -> LayerCache:
        """The cache for a layer that reads so many columns more."""
        self.columns += columns
        return self.held

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """A memory makes its tensors itself."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("a memory holds no keys and values; call the model with the cache that it returns")

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions of transformers

    def offload(self) -> None:
        """A memory is small: it stays where it is."""

    prefetch = offload

    def reset(self) -> None:
        self.held, self.columns = LayerCache(), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.held.apply(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.held.apply(lambda x: x[indices.to(x.device)])


class HybridCache(RecordingCache, DynamicCache):
    """Keys and values of the layers with attention, and memories of constant size of the others. Tokens are taken back as from a
    `FastWeightsCache`.

    Args:
        config: of the hybrid.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        memory: Sequence[Any] = config.memory[: len(self.layers)]  # fewer where generate() drafts with the first layers
        self.layers = [
            layer if entry is None else MemoryCacheLayer() for layer, entry in zip(self.layers, memory, strict=True)
        ]

    is_compileable = property(lambda self: False)  # generate() would compile the model, and pass masks of another kind

    def copy(self) -> HybridCache:
        """An independent cache at the same point, with the same tensors."""
        copied = copy.copy(self)
        copied.take_states(self)
        copied.recording = None if self.recording is None else self.recording.copy()
        return copied

    def take_states(self, other: HybridCache) -> None:
        self.layers = [copy.copy(layer) for layer in other.layers]
        for layer in self.layers:
            if isinstance(layer, MemoryCacheLayer):
                layer.held = layer.held.copy()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) + (0 if self.unread is None else len(self.unread))

    def reset(self) -> None:
        super().reset()
        self.recording = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.change_recorded_rows(
            lambda x: x.repeat_interleave(repeats, 0), lambda cache: cache.batch_repeat_interleave(repeats)
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.change_recorded_rows(lambda x: x[indices.to(x.device)], lambda cache: cache.batch_select_indices(indices))


def attention_state_size(attention: Any, layer: Any, length: int) -> int:
    """How many numbers attention keeps per sequence after `length` tokens: keys and values, of a window where it has one. layer:
    of a cache, which knows the window."""
    kept = min(length, layer.sliding_window - 1) if layer.is_sliding else length
    return 2 * kept * attention.config.num_key_value_heads * attention.head_dim


def check_hybrid_cache(cache: object, config: Any) -> None:
    """TypeError unless it is a `HybridCache`, ValueError unless its layers are those of the configuration. PEFT's prefix tuning
    brings a cache of keys and values."""
    wanted = "past_key_values must be a HybridCache of the layers of this model, as it returns it, got"
    if not isinstance(cache, HybridCache):
        raise TypeError(
            f"{wanted} {type(cache).__name__}; memories hold no keys and values of tokens: prefix tuning and cartridges do not "
            "fit, take prompt tuning, p-tuning or LoRA"
        )
    wanted_kinds = [entry is not None for entry in config.memory]
    kinds = [isinstance(layer, MemoryCacheLayer) for layer in cache.layers]
    if kinds not in (wanted_kinds, wanted_kinds[: config.num_hidden_layers]):
        raise ValueError(f"{wanted} one of another model; start without a cache")
