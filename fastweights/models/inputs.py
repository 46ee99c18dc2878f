"""Checks of the arguments of a language model. Messages name the argument, what it must be, what it was, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..checks import check_dense, check_whole_number, describe_value, shape_of, values_are_checked
from ..layers.mixer import check_like_parameters
from .loss import IGNORED

__all__ = [
    "LARGEST_VOCABULARY",
    "check_cache_position",
    "check_classes",
    "check_embeddings",
    "check_ids",
    "check_label_tensor",
    "check_labels",
    "check_token",
    "is_batch",
    "kept_positions",
]

LARGEST_VOCABULARY = 2**31


def is_batch(tokens: object) -> TypeGuard[Tensor]:
    """Whether ids or embeddings have a batch and a time dimension. The body refuses all others."""
    return isinstance(tokens, Tensor) and not tokens.is_nested and tokens.ndim >= 2


def check_ids(input_ids: object, model: Any) -> Tensor:
    """Token ids [B, T]. On a GPU an id outside the vocabulary is left to the embedding's own assertion, because reading ids
    would wait for the device. The size of the vocabulary is taken from the configuration, which follows a resized embedding: an
    adapter may hide the embedding's own size."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be an int64 tensor [batch, time >= 1], got {type(input_ids).__name__}; convert it with "
            "torch.tensor, text with the model's tokenizer"
        )
    check_dense("input_ids", input_ids)
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be int64 or int32, got {input_ids.dtype}; convert them with input_ids.long()")
    if input_ids.ndim != 2:
        raise ValueError(
            f"input_ids must be [batch, time], got shape {shape_of(input_ids)}; one sequence is input_ids[None]"
        )
    if input_ids.shape[1] < 1:
        raise ValueError(f"input_ids must hold at least one token, got shape {shape_of(input_ids)}")
    if input_ids.device.type == "meta" != model.device.type:
        raise ValueError(f"input_ids must be on the device of the model, {model.device}, got meta; pass numbers")
    if values_are_checked(input_ids) and input_ids.numel():
        low, high = (int(end) for end in torch.aminmax(input_ids))
        if low < 0 or high >= model.config.vocab_size:
            hint = f"; {IGNORED} belongs in labels only" if low == IGNORED else ""
            raise ValueError(
                f"input_ids must be from 0 to {model.config.vocab_size - 1}, the model's vocabulary, got {low} to {high}; use "
                f"the tokenizer that the model was made for{hint}"
            )
    return input_ids


def check_embeddings(inputs_embeds: object, width: int, model: nn.Module) -> Tensor:
    """Embeddings [B, T, D] in place of ids."""
    wanted = f"inputs_embeds must be a tensor [batch, time >= 1, {width}]"
    if not isinstance(inputs_embeds, Tensor):
        raise TypeError(f"{wanted}, got {type(inputs_embeds).__name__}; convert it with torch.as_tensor")
    check_dense("inputs_embeds", inputs_embeds)
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != width or inputs_embeds.shape[1] < 1:
        raise ValueError(f"{wanted}, got shape {shape_of(inputs_embeds)}")
    if not torch.compiler.is_compiling():
        check_like_parameters("inputs_embeds", inputs_embeds, model)
    return inputs_embeds


def check_labels(labels: object, tokens: Tensor, vocab_size: int) -> None:
    """Labels [B, T] for the ids or embeddings `tokens`. On a GPU a label outside the vocabulary is left to torch's loss,
    because reading labels would wait for the device."""
    wanted = check_label_tensor("labels", labels, tokens.shape[:2])
    if wanted.device.type == "meta" != tokens.device.type:
        raise ValueError(f"labels must be on the device of the input, {tokens.device}, got meta; pass numbers")
    _check_range("labels", wanted, vocab_size, "use the tokenizer that the model was made for")


def check_classes(name: str, labels: object, shape: Sequence[int], num_labels: int) -> None:
    """Class numbers of a head's labels."""
    wanted = check_label_tensor(name, labels, shape)
    _check_range(name, wanted, num_labels, "make the model with as many num_labels as there are classes")


def check_label_tensor(name: str, labels: object, shape: Sequence[int]) -> Tensor:
    """An int64 tensor of this shape."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be an int64 tensor {list(shape)}, got {type(labels).__name__}")
    check_dense(name, labels)
    if labels.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {labels.dtype}; convert them with {name}.long()")
    if list(labels.shape) != list(shape):
        raise ValueError(f"{name} must have the shape of the input, {list(shape)}, got {shape_of(labels)}")
    return labels


def _check_range(name: str, labels: Tensor, count: int, remedy: str) -> None:
    if values_are_checked(labels) and ((labels >= count) | ((labels < 0) & (labels != IGNORED))).any():
        raise ValueError(
            f"{name} must be from 0 to {count - 1}, or {IGNORED} where there is none, got {int(labels.min())} to "
            f"{int(labels.max())}; {remedy}"
        )


def check_cache_position(cache_position: object, columns: int, time: int) -> None:
    """The columns [T] of an input that follows `columns` columns in a cache. A memory cannot go back to an earlier column."""
    if cache_position is None:
        return
    wanted = f"cache_position must be int64 [{time}], the columns of the input after the {columns} of past_key_values"
    if not isinstance(cache_position, Tensor):
        raise TypeError(f"{wanted}, got {type(cache_position).__name__}; leave it out")
    check_dense("cache_position", cache_position)
    if cache_position.dtype not in (torch.int32, torch.int64) or list(cache_position.shape) != [time]:
        raise ValueError(f"{wanted}, got {cache_position.dtype} {shape_of(cache_position)}; leave it out")
    if values_are_checked(cache_position):
        first, last = int(cache_position[0]), int(cache_position[-1])
        if first != columns or (cache_position.diff() != 1).any():
            raise ValueError(f"{wanted}, got {first} to {last}; leave it out, or pass a cache that ends there")


def kept_positions(logits_to_keep: object, time: int) -> slice | Tensor:
    """The positions whose logits are computed."""
    if isinstance(logits_to_keep, Tensor):
        check_dense("logits_to_keep", logits_to_keep)
        if logits_to_keep.dtype != torch.int64 or logits_to_keep.ndim != 1:
            raise ValueError(
                f"logits_to_keep must be a number or int64 positions [P], got {logits_to_keep.dtype} {shape_of(logits_to_keep)}"
            )
        if values_are_checked(logits_to_keep) and ((logits_to_keep >= time) | (logits_to_keep < -time)).any():
            raise ValueError(
                f"logits_to_keep must hold positions of the input, below {time}, got {logits_to_keep.tolist()}"
            )
        return logits_to_keep
    if logits_to_keep is None:
        return slice(0, None)
    return slice(-check_whole_number("logits_to_keep", logits_to_keep), None)


def check_token(name: str, token: object, vocab_size: int, *, several: bool = False) -> None:
    """None or a token of the vocabulary; with `several` also a list of tokens."""
    tokens = token if several and isinstance(token, (list, tuple)) else [token]
    if not tokens:
        raise ValueError(f"{name} must be None, a token id or a list of at least one, got {describe_value(token)}")
    for one in tokens:
        if one is not None or isinstance(token, (list, tuple)):
            check_whole_number(name, one, high=vocab_size - 1)
