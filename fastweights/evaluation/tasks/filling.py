"""Prompts that are filled up to a context length in tokens, and the score of what a model says behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from transformers import AutoTokenizer

__all__ = ["fill", "score_answer", "token_counter"]

Item = TypeVar("Item")


def token_counter(tokenizer: str) -> Callable[[str], int]:
    """The number of tokens of a text, by the name or folder of a tokenizer."""
    known = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    return lambda text: len(known(text, verbose=False).input_ids)


def fill(
    prompt: Callable[[Sequence[Item]], str], items: Iterator[Item], count_tokens: Callable[[str], int], room: int
) -> list[Item]:
    """The first of endless items, as many as a prompt of at most `room` tokens holds. Few prompts are tokenised: the number is
    guessed from the tokens per item so far.

    Raises:
        ValueError: the prompt is longer without any item.
    """
    empty = count_tokens(prompt([]))
    if empty > room:
        raise ValueError(f"a context length must have room for {empty} tokens of a prompt without content, got {room}")
    taken: list[Item] = []
    fitting, too_many, guess = 0, None, 16
    while too_many is None or too_many - fitting > 1:
        taken += islice(items, max(0, guess - len(taken)))
        tokens = count_tokens(prompt(taken[:guess]))
        if tokens <= room:
            fitting = guess
        else:
            too_many = guess
        likely = int((room - empty) * guess / max(tokens - empty, 1))
        guess = max(likely, fitting + 1) if too_many is None else min(max(likely, fitting + 1), too_many - 1)
    return taken[:fitting]


def score_answer(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the continuation is the answer, under the name of the prompt's length, as RULER's tasks of the harness have it.
    A label must be all that the first line says; a value must stand in the continuation."""
    said = results[0].strip()
    if doc["is_label"]:
        found = said.partition("\n")[0].removeprefix("label:").strip() == doc["output"]
    else:
        found = doc["output"].lower() in said.lower()
    return {str(doc["max_length"]): float(found)}
