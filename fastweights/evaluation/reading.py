"""Reading text with a trained model: tokens of a prompt, long sequences in blocks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import LARGEST_COUNT, check_size, describe_value
from ..environment import within_memory
from .causal_models import empty_cache, final_hidden

__all__ = [
    "MOST_EXAMPLES",
    "TEST_BATCH",
    "check_lengths",
    "check_losses",
    "check_model",
    "check_tokenizer",
    "evaluating",
    "hidden_blocks",
    "prompt_tokens",
    "read",
    "within_memory",
]


MOST_EXAMPLES = 10**7  # the standard error of an accuracy is then at most 0.02%
TEST_BATCH = 128  # sequences of a recall or regression task drawn at a time


def check_model(model: object, name: str = "model") -> None:
    """Refuse what is not a language model, such as the name of one. name: of the argument."""
    if not isinstance(model, nn.Module) or not hasattr(model, "lm_head") or not hasattr(model, "config"):
        raise TypeError(
            f"{name} must be a FastWeightsForCausalLM or another causal language model of transformers, got "
            f"{describe_value(model)}; load_language_model loads one from its folder"
        )


def check_losses(losses: Tensor) -> None:
    """ValueError unless all losses of a model are finite."""
    if not losses.isfinite().all():
        raise ValueError("model must give finite losses, got NaN or infinite ones; its weights are damaged")


def check_tokenizer(tokenizer: object) -> None:
    """Refuse what is not a tokenizer, such as the path of one."""
    if not callable(tokenizer) or not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"tokenizer must be one of transformers' tokenizers, got {describe_value(tokenizer)}; load_language_model loads the "
            "one beside a model"
        )


def check_lengths(lengths: Sequence[int], at_least: int, *, name: str = "lengths") -> list[int]:
    """The different lengths in ascending order. ValueError: none, or one below `at_least`. TypeError: no list of integers."""
    if isinstance(lengths, str) or not isinstance(lengths, Sequence):
        raise TypeError(f"{name} must be a list of whole numbers, got {describe_value(lengths)}")
    if not lengths:
        raise ValueError(f"{name} must hold at least one length, got none")
    for length in lengths:
        check_size(name, length, high=LARGEST_COUNT)
        if length < at_least:
            raise ValueError(f"{name} must be at least {at_least} tokens, got {length}")
    return sorted(set(lengths))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """In the body, the model is in evaluation mode and no gradients are kept; afterwards it is in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def hidden_blocks(
    model: Any, ids_BT: Tensor, block: int, cache: Any = None, mask_BS: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The first position and the final hidden states [B, at most block, D] of each block of a sequence, in order.

    cache: what came before the sequence; it is brought up to date. mask: 0 for padding, whose hidden states mean nothing; of the
    tokens in the cache, then of the sequence.
    """
    cache = empty_cache(model) if cache is None else cache
    before = 0 if mask_BS is None else mask_BS.shape[1] - ids_BT.shape[1]
    for start in range(0, ids_BT.shape[1], block):
        end = min(start + block, ids_BT.shape[1])
        mask = None if mask_BS is None else mask_BS[:, : before + end]
        yield start, final_hidden(model, ids_BT[:, start:end], mask, past_key_values=cache)


def read(model: Any, ids_BT: Tensor, block: int, mask_BT: Tensor | None = None) -> Any:
    """The cache of a model that has read a sequence. mask: 0 for padding."""
    cache = empty_cache(model)
    for _ in hidden_blocks(model, ids_BT, block, cache, mask_BT):
        pass
    return cache


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text to be continued: with the tokens that the tokenizer puts before a text, without those after it."""
    ids = list(tokenizer(text, verbose=False).input_ids)
    after = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id, None}
    while ids and ids[-1] in after:
        ids.pop()
    return ids
