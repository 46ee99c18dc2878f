"""Text to token ids in the form that a model continues."""

from typing import Any

__all__ = ["prompt_tokens"]


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that goes on: with what the tokenizer puts in front of a text, without what it puts behind it."""
    ids = list(tokenizer(text, verbose=False).input_ids)
    behind = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {tokenizer.bos_token_id, None}
    while ids and ids[-1] in behind:
        ids.pop()
    return ids
