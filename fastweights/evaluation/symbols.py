"""Recall tasks in the words of a text model: the tasks' symbols as tokens of its vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_size
from ..data import IGNORE_INDEX, Batch, RecallTask
from ..kinds import checked
from .reading import check_tokenizer

__all__ = ["TaskInWords", "word_tokens"]


@checked
def word_tokens(tokenizer: Any, count: int) -> Tensor:
    """The first `count` tokens of a vocabulary that are words, int64 [count]: symbol s of a task is the s-th of them.

    A word here is a token whose text, without the space around it, is two letters or more, whichever case or spacing of the
    word has the lowest id; special tokens are left out. The ids of tokenizers that merge pairs of tokens (BPE) rise with the
    order of merging, so these are words that a model has seen often.

    Raises:
        ValueError: the vocabulary holds fewer words.
    """
    check_tokenizer(tokenizer)
    check_size("count", count)
    special, found = set(tokenizer.all_special_ids), dict[str, int]()
    for token in range(len(tokenizer)):
        word = tokenizer.decode([token]).strip().casefold()
        if len(word) >= 2 and word.isalpha() and token not in special:
            found.setdefault(word, token)
            if len(found) == count:
                return torch.tensor(list(found.values()))
    raise ValueError(
        f"symbols must be at most {len(found)}, the words that the tokenizer has as single tokens, got {count}; "
        "take fewer symbols and pairs"
    )


@checked
class TaskInWords:
    """A recall task whose batches hold tokens of a text model.

    task: a task with as many symbols (vocab_size) as `tokens` [symbols] has entries; symbol s becomes tokens[s].
    first: tokens that the tokenizer puts before every text, if any; the task's length does not count them.
    """

    def __init__(self, task: RecallTask, tokens: Tensor, first: list[int]) -> None:
        self.task, self.tokens, self.first = task, tokens, torch.tensor(first, dtype=torch.int64)

    def batch(self, split: str, *, seed: int, index: int, batch_size: int) -> Batch:
        """As `RecallTask.batch`, in tokens."""
        input_ids, labels = self.task.batch(split, seed=seed, index=index, batch_size=batch_size)
        tokens = torch.where(labels == IGNORE_INDEX, labels, self.tokens[labels.clamp_min(0)])
        first = self.first.expand(batch_size, -1)
        return Batch(torch.cat([first, self.tokens[input_ids]], 1), torch.cat([first * 0 + IGNORE_INDEX, tokens], 1))
