"""The cache of a model: one layer cache per layer, with the interface that transformers' generate() expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..checks import (
    LARGEST_DEPTH,
    check_real,
    check_size,
    check_whole_number,
    describe_value,
    shape_of,
    values_are_checked,
)
from ..kinds import checked
from ..layers import LayerCache
from .decoding import DecodeSteps
from .recording import RecordingCache

__all__ = ["CACHE_NAME", "CACHE_NAMES", "FastWeightsCache", "check_cache", "given_cache", "named_cache"]

CACHE_NAMES = ("past_key_values", "cache")  # of a model's argument; transformers 5.24 made the second of the first
# What the installed transformers calls it, in its outputs and within generate().
CACHE_NAME = next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)


@checked
class FastWeightsCache(RecordingCache):
    """The states of all layers after the sequences that a model has read. Its size depends on their length only where a
    layer is softmax attention.

    A memory is no list of tokens: no token can be removed from it. To return to a prefix, keep a `copy` of the cache made after
    the prefix, or record (`RecordingCache`), as generate() does for assisted decoding. A cache of which columns were taken back
    (`crop`) has its layers at a checkpoint before these, until its model has read what remains.

    Attributes:
        layers: one `LayerCache` per layer.
        columns: how many columns of the batch its layers have read, padding included. `get_seq_length` also counts those that the
            model reads again.
        position: [N], the position of each sequence's next token, -1 before its first one. None while every sequence has
            read every column, from position 0.
        prompts: the `PromptReader` of a running `generate()`, None outside of it.
        steps: how it reads single tokens.
        drafts: the `DraftReader` of a running assisted `generate()`, None outside of it.
    """

    layers: list[LayerCache]  # type: ignore[assignment]  # not transformers' layers, which hold keys and values

    def __init__(self, layers: list[LayerCache]) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.columns = 0
        self.position: Tensor | None = None
        self.prompts: Any = None
        self.steps: DecodeSteps | None = None
        self.drafts: Any = None

    @classmethod
    def empty(cls, num_layers: int) -> FastWeightsCache:
        check_whole_number("num_layers", num_layers, high=LARGEST_DEPTH)
        return cls([LayerCache() for _ in range(num_layers)])

    def step(self, ids: Tensor | None) -> Tensor | None:
        """Logits [N, 1, vocab_size] after one token more per sequence. None where no steps serve the call, which ends them."""
        if self.steps is None:
            return None
        if not self.steps.serve(ids, self.layers, self.columns):
            self.end_steps()
            return None
        assert ids is not None
        logits = self.steps(ids)
        self.columns += 1
        if self.position is not None:
            self.position = self.position + 1
        return logits

    def decodes_by_steps(self) -> bool:
        """Whether a running `generate()` has begun to decode by its steps, which are captured where they can be."""
        return self.steps is not None and self.steps.logits is not None

    def end_steps(self, kept: bool = True) -> None:
        """Make the layers' caches ordinary ones again, after `generate()`; leave them where the cache is not kept."""
        if self.steps is not None:
            self.steps.end(self.layers if kept else None)
        self.steps = None

    def copy(self) -> FastWeightsCache:
        """An independent cache at the same point. It costs nothing: layers never write into a tensor that a cache holds, except
        in the steps of a running `generate()`, where its tensors are copied."""
        layers = self.layers if self.steps is None else self.steps.copy_caches(self.layers)
        copied = FastWeightsCache([layer.copy() for layer in layers])
        copied.columns, copied.position = self.columns, self.position
        copied.recording = None if self.recording is None else self.recording.copy()
        return copied

    def take_states(self, other: FastWeightsCache) -> None:
        self.layers = [layer.copy() for layer in other.layers]
        self.columns, self.position = other.columns, other.position

    def check_positions(self, first_N: Tensor | None, lengths_N: Tensor | None) -> None:
        """Whether the first positions of the tokens that come next continue where the sequences ended. None: not given.

        Raises:
            ValueError: they do not.
        """
        if first_N is None or not self.columns:
            return
        expected_N = first_N.new_full((self.batch_size,), self.columns) if self.position is None else self.position
        expected_N = expected_N.to(first_N.device)
        if expected_N.shape != first_N.shape:
            return  # the layers refuse another number of sequences
        wrong = (expected_N >= 0) & (first_N != expected_N)
        wrong &= lengths_N.to(first_N.device) > 0 if lengths_N is not None else True
        if wrong.any():
            raise ValueError(
                f"position_ids must continue where the sequences of past_key_values ended, at {expected_N.tolist()}, got "
                f"{first_N.tolist()}; start an empty cache for other documents"
            )

    def advance(self, columns: int, first_N: Tensor | None, lengths_N: Tensor | None) -> None:
        """Count what the layers have read: columns of the batch, and the tokens and first positions of each sequence."""
        if first_N is not None or lengths_N is not None or self.position is not None:
            self.position = self._next_position(columns, first_N, lengths_N)
        self.columns += columns

    def _next_position(self, columns: int, first_N: Tensor | None, lengths_N: Tensor | None) -> Tensor:
        before_N = self.position
        if before_N is None:
            like = lengths_N if first_N is None else first_N
            assert like is not None
            before_N = torch.full_like(like, self.columns or -1, dtype=torch.long)
        start_N = before_N.clamp_min(0) if first_N is None else first_N.to(before_N.device)
        if lengths_N is None:
            return start_N + columns
        lengths_N = lengths_N.to(before_N.device)
        return torch.where(lengths_N > 0, start_N + lengths_N, before_N)

    @property
    def batch_size(self) -> int:
        """How many sequences it holds, -1 while it is empty."""
        empty = -1 if self.unread is None else len(self.unread.ids)
        return next((layer.count for layer in self.layers if layer.count is not None), empty)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns + (0 if self.unread is None else len(self.unread))

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # transformers' word for "no limit"

    # generate() compiles the model by itself when a cache says that it is compileable, and then passes masks of another kind.
    is_compileable = property(lambda self: False)
    max_cache_len = property(lambda self: -1)  # as get_max_length
    is_initialized = property(lambda self: self.batch_size != -1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes what row beam_idx[n] was (beam search).

        Raises:
            ValueError: beam_idx is not int64 or int32 [rows], or names a row that the cache does not have. On a GPU its numbers
                are looked at with FASTWEIGHTS_CHECK_VALUES=1 only.
            TypeError: no tensor.
        """
        self._take_rows("beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times, one copy after the other.

        Raises:
            ValueError, TypeError: repeats is no positive whole number.
        """
        check_size("repeats", repeats)
        self._apply(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these indices, or where a bool tensor [N] is True. Errors as in `reorder_cache`."""
        if isinstance(indices, Tensor) and indices.dtype == torch.bool and indices.ndim == 1:
            if self.is_initialized and len(indices) != self.batch_size:
                raise ValueError(
                    f"indices must be int64, or bool for each of the {self.batch_size} rows of the cache, got bool "
                    f"{shape_of(indices)}"
                )
            indices = indices.nonzero()[:, 0]
        self._take_rows("indices", indices)

    def _take_rows(self, name: str, rows: Tensor) -> None:
        wanted = f"{name} must be int64 [rows], numbers of rows of the cache"
        if not isinstance(rows, Tensor):
            raise TypeError(f"{wanted}, got {describe_value(rows)}; convert it with torch.tensor")
        check_real(name, rows)
        if rows.dtype not in (torch.int32, torch.int64) or rows.ndim != 1:
            raise ValueError(f"{wanted}, got {rows.dtype} {shape_of(rows)}; convert it with {name}.long()")
        if self.is_initialized and len(rows) and values_are_checked(rows):
            low, high = (int(end) for end in torch.aminmax(rows))
            if low < 0 or high >= self.batch_size:
                raise ValueError(
                    f"{name} must be from 0 to {self.batch_size - 1}, the rows of the cache, got {low} to {high}"
                )
        self._apply(lambda x: x.index_select(0, rows.to(x.device)))

    def reset(self) -> None:
        """Forget everything."""
        self.layers = [LayerCache() for _ in self.layers]
        self.columns, self.position, self.steps, self.recording = 0, None, None, None

    def activate_past_recording(self) -> None:
        self.end_steps()
        super().activate_past_recording()

    def _apply(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.apply(change)
        if self.position is not None:
            self.position = change(self.position)
        self.change_recorded_rows(change, lambda cache: cache._apply(change))


def check_cache(cache: object, layers: int) -> None:
    """TypeError unless it is a `FastWeightsCache`, ValueError unless it has so many layers. PEFT's prefix tuning brings a
    cache of keys and values."""
    wanted = f"past_key_values must be a FastWeightsCache of {layers} layers, as this model returns it, got"
    if isinstance(cache, FastWeightsCache):
        if len(cache.layers) != layers:
            raise ValueError(f"{wanted} one of {len(cache.layers)} layers")
        return
    hint = ""
    if isinstance(cache, Cache):
        hint = (
            "; the layers' memories hold no keys and values of tokens: prefix tuning and cartridges do not fit, take prompt "
            "tuning, p-tuning or LoRA"
        )
    raise TypeError(f"{wanted} {type(cache).__name__}{hint}")


def given_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that was given under either name, or None.

    Raises:
        ValueError: two caches.
    """
    if cache is None or cache is past_key_values:
        return past_key_values
    if past_key_values is None:
        return cache
    raise ValueError("cache must be None where past_key_values is given, both are the cache; pass one of them")


def named_cache(cache: Any) -> dict[str, Any]:
    """The cache as a field of an output of transformers."""
    return {CACHE_NAME: cache}
