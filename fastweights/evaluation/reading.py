"""Reading text with a trained model: tokens of a prompt, long sequences in blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import describe_value
from ..environment import within_memory
from ..models import FastWeightsCache

__all__ = [
    "MOST_EXAMPLES",
    "check_model",
    "check_tokenizer",
    "evaluating",
    "hidden_blocks",
    "prompt_tokens",
    "read",
    "within_memory",
]


MOST_EXAMPLES = 10**7  # which give an accuracy to 0.02 %


def check_model(model: object) -> None:
    """TypeError for a model that is none, such as its name."""
    if not isinstance(model, nn.Module) or not hasattr(model, "lm_head") or not hasattr(model, "config"):
        raise TypeError(
            f"model must be a FastWeightsForCausalLM, got {describe_value(model)}; load_language_model loads one from its folder"
        )


def check_tokenizer(tokenizer: object) -> None:
    """TypeError for a tokenizer that is none, such as its path."""
    if not callable(tokenizer) or not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"tokenizer must be one of transformers' tokenizers, got {describe_value(tokenizer)}; load_language_model loads the "
            "one beside a model"
        )


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
    model: Any, ids_BT: Tensor, block: int, cache: FastWeightsCache | None = None, mask_BT: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The first position and the final hidden states [B, at most block, D] of each block of a sequence, in order.

    cache: what came before the sequence; it is brought up to date. mask: 0 for padding, whose hidden states are zero.
    """
    cache = FastWeightsCache.empty(model.config.num_hidden_layers) if cache is None else cache
    for start in range(0, ids_BT.shape[1], block):
        part = slice(start, start + block)
        mask = None if mask_BT is None else mask_BT[:, part]
        yield start, model.model(ids_BT[:, part], attention_mask=mask, past_key_values=cache).last_hidden_state


def read(model: Any, ids_BT: Tensor, block: int, mask_BT: Tensor | None = None) -> FastWeightsCache:
    """The cache of a model that has read a sequence. mask: 0 for padding."""
    cache = FastWeightsCache.empty(model.config.num_hidden_layers)
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
