"""Caches that can return to one of the tokens that they have read last, for decoding that takes drafted tokens back.

A memory is no list of tokens, and the state after every token would be large. A cache that records therefore keeps its states
at a checkpoint and the ids of the columns that were read since. `crop` returns to the checkpoint. The model reads the columns
that remain again, in front of its next input and in the same call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ..checks import LARGEST_COUNTER, check_whole_number
from .inputs import is_batch
from .rows import own_columns

__all__ = ["Recording", "RecordingCache", "reads_again"]

MERGED = 16  # columns that are read again in front of an input; before more of them the checkpoint moves on
# Arguments of a call that may read columns again in front of its own, and those of a call whose columns are not recorded.
ORDINARY = {"self", "kwargs", "input_ids", "attention_mask", "position_ids", "past_key_values", "cache", "use_cache"}
ORDINARY |= {"logits_to_keep", "return_dict"}
UNRECORDED = {"inputs_embeds", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}
# In earlier versions of transformers a number that is not negative says how many columns crop keeps, 0 among them.
CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicCache.crop).parameters


@dataclass(frozen=True)
class Columns:
    """Columns of a batch in the order in which they were read.

    Attributes:
        ids: int64 [N, T].
        mask: [N, S], the attention_mask that ends with them; None where all are tokens.
        positions: int64 [N, T]; None where none were given.
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def of_call(cls, given: dict[str, Any]) -> Columns:
        """Those of a model's arguments."""
        ids, positions = given["input_ids"], given.get("position_ids")
        return cls(ids, given.get("attention_mask"), None if positions is None else positions.expand(len(ids), -1))

    def __len__(self) -> int:
        return self.ids.shape[1]

    def arguments(self) -> dict[str, Tensor | None]:
        return {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": self.positions}

    def precedes(self, other: Columns) -> bool:
        """Whether one call can read both."""
        return (self.positions is None) == (other.positions is None)

    def followed_by(self, other: Columns) -> Columns:
        """Both. A mask that is given covers all columns that the cache has read, or those of its call alone."""
        mask, time = other.mask, len(self) + len(other)
        if self.mask is not None or (mask is not None and mask.shape[1] < time):
            before = torch.ones_like(self.ids) if self.mask is None else self.mask
            after = torch.ones_like(other.ids) if mask is None else own_columns(mask, len(other))
            mask = torch.cat([before, after.to(before)], 1)
        positions = None
        if self.positions is not None and other.positions is not None:
            positions = torch.cat([self.positions, other.positions], 1)
        return Columns(torch.cat([self.ids, other.ids], 1), mask, positions)

    def without_last(self, removed: int) -> Columns:
        return self.apply(lambda x: x[:, : x.shape[1] - removed])

    def apply(self, change: Callable[[Tensor], Tensor]) -> Columns:
        mask, positions = (None if x is None else change(x) for x in (self.mask, self.positions))
        return Columns(change(self.ids), mask, positions)


@dataclass
class Recording:
    """What a cache needs to return to a token that it has read since a checkpoint.

    Attributes:
        checkpoint: a copy of the cache, in which nothing is recorded.
        columns: what was read since then; None for nothing.
        unread: whether the cache is at the checkpoint, and its model has to read the columns again.
    """

    checkpoint: RecordingCache
    columns: Columns | None = None
    unread: bool = False

    @classmethod
    def begin(cls, cache: RecordingCache) -> Recording:
        """With the checkpoint at what the cache is now."""
        checkpoint = cache.copy()
        checkpoint.recording = None
        return cls(checkpoint)

    def followed_by(self, before: RecordingCache, new: Columns) -> Recording:
        """With columns that were read after these. before: the cache before them, the checkpoint where both cannot be read again
        in one call."""
        if self.columns is None:
            return Recording(self.checkpoint, new)
        if not self.columns.precedes(new):
            return Recording(before, new)
        return Recording(self.checkpoint, self.columns.followed_by(new))

    def copy(self) -> Recording:
        return Recording(self.checkpoint.copy(), self.columns, self.unread)


class RecordingCache(Cache):
    """In front of a class of caches: transformers' interface for taking tokens back.

    While it records, a cache holds its tensors twice, as they are now and as they were at the checkpoint, with 8 bytes per
    sequence and column read since for the ids, and as many each for a mask and for positions where they are given. The
    checkpoint is where recording began or `crop(0)` was last called. It moves on where more than 16 columns would be read again.

    The states after `crop` are those of the tokens that remain, read in other blocks: they differ as much as those of a prompt
    that is read in other blocks, by rounding.

    Attributes:
        recording: what is recorded, None where nothing is.
    """

    recording: Recording | None = None

    def copy(self) -> Any:
        """An independent cache at the same point. Tensors are shared, because no layer writes into one that a cache holds."""
        raise NotImplementedError

    def take_states(self, other: Any) -> None:
        """Become what the other cache is, a copy of this one, with its layers' own objects."""
        raise NotImplementedError

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can return to earlier tokens: those that were read since `activate_past_recording`."""
        return self.recording is not None

    @property
    def unread(self) -> Columns | None:
        """The columns that the model reads again in front of its next input."""
        return self.recording.columns if self.recording is not None and self.recording.unread else None

    def activate_past_recording(self) -> None:
        """Record what is read from now on, so that `crop` can take it back."""
        if self.recording is None:
            self.recording = Recording.begin(self)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take the last columns back.

        Args:
            tokens_to_remove: how many, as a negative number, or a tensor [] of one; 0 keeps all, and lets later calls return no
                further than to this point. A number above 0, and 0 in versions of transformers whose own `crop` takes
                `max_length`, is how many are kept.

        Raises:
            ValueError: nothing is recorded, or fewer columns.
            TypeError: no whole number.
        """
        if isinstance(tokens_to_remove, Tensor) and not tokens_to_remove.ndim:  # of some versions of transformers
            tokens_to_remove = int(tokens_to_remove)
        change = check_whole_number("tokens_to_remove", tokens_to_remove, low=-LARGEST_COUNTER)
        recording = self.recording
        if recording is None:
            raise ValueError(
                "a cache can be cropped after activate_past_recording() only, because no token can be removed from a memory; "
                "call it before the tokens are read, or keep a copy() of the cache to return to"
            )
        removed = -change
        if change > 0 or (change == 0 and CROPS_TO_LENGTH):
            removed = max(self.get_seq_length() - change, 0)
        if not removed:
            if not recording.unread:
                self.recording = Recording.begin(self)
            return
        known = 0 if recording.columns is None else len(recording.columns)
        if removed > known:
            raise ValueError(
                f"tokens_to_remove must be at most the {known} columns that the cache has recorded, got {removed}; call "
                "activate_past_recording() before more of them are read"
            )
        assert recording.columns is not None
        self.take_states(recording.checkpoint)
        recording.unread = removed < known
        recording.columns = recording.columns.without_last(removed) if recording.unread else None

    def end_recording(self, model: Any) -> None:
        """Let the model read what `crop` has left to be read again, and record no more."""
        read_unread(model, self)
        self.recording = None

    def change_recorded_rows(self, change: Callable[[Tensor], Tensor], change_cache: Callable[[Any], None]) -> None:
        """Change the rows of what is recorded: of each tensor, and of the cache at the checkpoint."""
        if self.recording is not None:
            change_cache(self.recording.checkpoint)
            if self.recording.columns is not None:
                self.recording.columns = self.recording.columns.apply(change)


def read_unread(model: Any, cache: RecordingCache) -> None:
    """Let the model read what `crop` has left, and move the checkpoint there."""
    columns = cache.unread
    if columns is None:
        return
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with _unrecorded(cache):
        model(**columns.arguments(), past_key_values=cache, use_cache=True, **keep)
        after = Recording.begin(cache)
    cache.recording = after


@contextmanager
def _unrecorded(cache: RecordingCache) -> Iterator[RecordingCache]:
    """Within, the cache is one that records nothing. After an error it is what it was before, of which this gives a copy."""
    recording, cache.recording = cache.recording, None
    before = cache.copy()
    try:
        yield before
    except BaseException:
        cache.take_states(before)
        raise
    finally:
        cache.recording = recording


def reads_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward for caches that may record: the model reads again what `crop` has left, and its input is recorded.

    A few columns are read again in front of the input, of which alone the output then tells. More of them, or in front of an
    input with other arguments than ids, a mask and positions, are read in a call of their own.
    """
    signature = inspect.signature(forward)

    @wraps(forward)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, RecordingCache)), None)
        if cache is None or cache.recording is None:
            return forward(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        told = {**call.arguments, **call.arguments.get("kwargs", {})}
        special = {name for name, x in told.items() if x is not None and x is not False} - ORDINARY
        if isinstance(told.get("logits_to_keep"), Tensor):
            special.add("logits_to_keep")
        own = None if special & UNRECORDED or not is_batch(told.get("input_ids")) else Columns.of_call(told)
        unread = cache.unread
        if unread is not None and (special or own is None or len(unread) > MERGED or not unread.precedes(own)):
            read_unread(self, cache)
            unread = None
        if unread is not None and own is not None:
            return _read_together(forward, call, cache, unread, own)
        with _unrecorded(cache) as before:
            output = forward(*call.args, **call.kwargs)
        cache.recording = Recording.begin(cache) if own is None else cache.recording.followed_by(before, own)
        return output

    return read


def _read_together(forward: Callable[..., Any], call: Any, cache: Any, unread: Columns, own: Columns) -> Any:
    """A call of a model that reads the columns that are unread in front of its own."""
    both, given = unread.followed_by(own), call.arguments
    given |= both.arguments()
    keeps = "logits_to_keep" in call.signature.parameters
    if keeps:
        given["logits_to_keep"] = given.get("logits_to_keep") or len(own)
    with _unrecorded(cache):
        output = forward(*call.args, **call.kwargs)
    cache.recording.columns, cache.recording.unread = both, False
    if not keeps:
        output.last_hidden_state = output.last_hidden_state[:, len(unread) :]
    return output
