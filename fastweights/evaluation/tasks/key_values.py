"""A value of a JSON object that fills a prompt, asked for by its key: Liu et al. 2024 (arXiv 2307.03172), as in HELMET."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any
from uuid import UUID

from datasets import Dataset

from fastweights.evaluation.tasks.filling import fill, token_counter

__all__ = ["documents"]

_SEED = 42
_VALUE_TOKENS = 100  # generated
_SHOWN = 2  # pairs of the object that are repeated behind it, as examples of an answer
_TASK = "Extract the value corresponding to the specified key in the JSON object below."


def documents(
    *, tokenizer: str, max_seq_lengths: Sequence[int] = (4096,), questions: int = 100, **_: Any
) -> dict[str, Dataset]:
    """Keys and values are UUIDs; the pair that is asked for stands at a random place.

    Args: as of `many_shot.documents`.
    """
    count = token_counter(tokenizer)
    rows = [_question(number, length, count) for length in max_seq_lengths for number in range(questions)]
    return {"test": Dataset.from_list(rows)}


def _question(number: int, length: int, count: Any) -> dict[str, Any]:
    draws = random.Random(f"{_SEED} {number}")
    pairs = _pairs(draws)
    asked, *shown = islice(pairs, 1 + _SHOWN)
    place = draws.random()

    def prompt(others: Sequence[tuple[str, str]]) -> str:
        listed = [*shown, *others]
        listed.insert(round(place * len(listed)), asked)
        examples = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in shown)
        return f"{json.dumps(dict(listed), indent=1)}\n\n{_TASK}\n\n{examples}Key: {asked[0]}\nCorresponding value:"

    text = prompt(fill(prompt, pairs, count, length - _VALUE_TOKENS))
    return {"input": text, "output": asked[1], "is_label": False, "max_length": length}


def _pairs(draws: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        key, value = (str(UUID(int=draws.getrandbits(128), version=4)) for _ in range(2))
        yield key, value
