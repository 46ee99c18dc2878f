"""Recall of a trained text model: the recall tasks in words of its vocabulary, at any context length."""

from __future__ import annotations

from typing import Any

from ..checks import check_choice, check_size
from ..data import RecallTask, make_task
from ..kinds import checked
from ..results import WordRecall
from .reading import MOST_EXAMPLES, check_model, check_tokenizer, prompt_tokens
from .recall import recall_accuracy
from .symbols import TaskInWords, word_tokens

__all__ = ["WORD_TASKS", "WordRecall", "task_in_words", "word_recall"]

# The filler of mqar is one word that is never a key: random filler would bind keys again in a long text.
WORD_TASKS: dict[str, dict[str, object]] = {
    "mqar": {"random_non_queries": False},
    "mqar-shuffled": {},
    "copy": {},
    "palindrome": {},
}


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
        task: "mqar" (its filler a single word), "mqar-shuffled", "copy" or "palindrome".
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
        chance=1 / pairs,
    )


def task_in_words(tokenizer: Any, task: str, *, length: int | None, pairs: int, symbols: int) -> TaskInWords:
    """The task that `word_recall` measures."""
    check_choice("the name of a recall task in words", task, WORD_TASKS)
    check_size("symbols", symbols)
    try:
        made = make_task(task, pairs=pairs, length=length, vocab_size=symbols, **WORD_TASKS[task])
    except ValueError as error:
        raise ValueError(str(error).replace("vocab_size", "symbols")) from None
    assert isinstance(made, RecallTask)  # tasks of vectors are not among WORD_TASKS
    return TaskInWords(made, word_tokens(tokenizer, symbols), prompt_tokens(tokenizer, ""))
