"""Recall of a trained text model: the recall tasks in words of its vocabulary, at any context length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice, check_size
from ..data import IGNORE_INDEX, TASKS, Batch, RecallTask, make_task
from ..kinds import checked
from ..results import WordRecall
from .reading import MOST_EXAMPLES, check_model, check_tokenizer, prompt_tokens
from .recall import recall_accuracy

__all__ = ["TaskInWords", "WordRecall", "task_in_words", "word_recall", "word_tasks", "word_tokens"]


def word_tasks() -> dict[str, Mapping[str, object]]:
    """The options of every task that text models are asked in words, by its name; those of users too."""
    kinds = {name: kind.in_words for name, kind in TASKS.items() if issubclass(kind, RecallTask)}
    return {name: options for name, options in kinds.items() if options is not None}


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


@checked
def word_recall(
    model: Any,
    tokenizer: Any,
    task: str,
    *,
    length: int | None = None,
    pairs: int = 8,
    symbols: int = 64,
    examples: int = 64,
    seed: int = 0,
    block: int = 512,
) -> WordRecall:
    """Accuracy on test sequences of a task of `fastweights.data` whose symbols are words (`word_tokens`).

    The prompt does not explain the task. A model can answer if it has learnt to repeat what followed a word earlier in the text.
    With the same pairs at every length, a longer text is a longer time to keep them.

    Args:
        task: "mqar" (its filler a single word), "mqar-shuffled", "copy", "palindrome", or a task of your own that sets
            `RecallTask.in_words`.
        length: tokens, without those that the tokenizer puts before a text; the task's shortest when None.
        pairs: key-value pairs; in copy and palindrome, tokens to repeat.
        symbols: how many different words there are.
        block: tokens to read at a time.

    Raises:
        ValueError: an unknown task, numbers that the task refuses, a tokenizer with fewer words, a model whose logits are not
            finite.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    check_size("examples", examples, high=MOST_EXAMPLES)
    check_size("block", block)
    in_words = task_in_words(tokenizer, task, length=length, pairs=pairs, symbols=symbols)
    accuracy = recall_accuracy(
        model, in_words, seed=seed, examples=examples, device=model.device, block=block, finite=True
    )
    return WordRecall(
        task=task,
        length=in_words.task.length,
        pairs=pairs,
        symbols=symbols,
        examples=examples,
        accuracy=accuracy,
        chance=in_words.task.chance,
    )


def task_in_words(tokenizer: Any, task: str, *, length: int | None, pairs: int, symbols: int) -> TaskInWords:
    """The task that `word_recall` measures."""
    options = word_tasks()
    check_choice("the name of a recall task in words", task, options)
    check_size("symbols", symbols)
    try:
        made = make_task(task, pairs=pairs, length=length, vocab_size=symbols, **options[task])
    except ValueError as error:
        raise ValueError(str(error).replace("vocab_size", "symbols")) from None
    assert isinstance(made, RecallTask)  # tasks of vectors have no words
    return TaskInWords(made, word_tokens(tokenizer, symbols), prompt_tokens(tokenizer, ""))
