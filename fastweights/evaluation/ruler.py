"""RULER's generated tasks beyond the single needle, for text models of any size."""

from __future__ import annotations

from typing import Any

from ..kinds import checked
from ..results import RulerRecall
from .answers import Question, check_questions, score_answers, token_counter
from .needle_text import haystack_words
from .reading import check_tokenizer
from .ruler_text import RULER_TASKS, ruler_draft, ruler_prompt

__all__ = ["RULER_TASKS", "RulerRecall", "check_ruler", "ruler_recall"]


@checked
def ruler_recall(
    model: Any,
    tokenizer: Any,
    task: str,
    *,
    length: int,
    examples: int = 10,
    seed: int = 0,
    text: str | None = None,
    block: int = 512,
    batch_size: int = 1,
) -> RulerRecall:
    """Ask a model `examples` questions about texts of `length` tokens.

    The tasks and their numbers are those of RULER (Hsieh et al. 2024, table 5) in words of our own; needles and statements
    stand at random depths:

    - mk-niah-1: four needles with different keys in running text, one is asked for. mk-niah-2: the text is nothing but
      needles. mk-niah-3: the same with UUIDs as keys and values.
    - mv-niah: one key has four values in running text. mq-niah: four keys with one value each, all are asked for.
    - vt: a variable is assigned a value, four others one after another the variable before; which have the value?
    - cwe: a list in which ten words of `text` stand 30 times and others 3 times; which are the ten?
    - fwe: coded words with frequencies 1 / (1.64 k^2); which three are most frequent, besides the dots?

    The prompt ends with the words before the answer, so that a model without instruction tuning can answer. It is read in
    blocks through the model's cache. Examples are a function of task, length, seed, text and tokenizer.

    Args:
        model: a `FastWeightsForCausalLM`.
        tokenizer: its transformers tokenizer.
        task: a name of RULER_TASKS.
        length: tokens of prompt and answer together, at most; a text is filled up as far as it fits.
        text: what to hide needles in and take words from; Python's language reference when None.
        block: tokens to read at a time.
        batch_size: prompts to read at a time. Memory grows with it; results are those of one at a time, but for rounding.

    Raises:
        ValueError: an argument out of its range, a text or length that does not hold the task, a model whose losses are not
            finite.
    """
    check_questions(model, length=length, examples=examples, seed=seed, block=block, batch_size=batch_size)
    check_tokenizer(tokenizer)
    words, count_tokens = haystack_words(text), token_counter(tokenizer)

    def question(index: int) -> Question:
        prompt, draft = ruler_prompt(
            task, length=length, seed=seed, index=index, words=words, count_tokens=count_tokens
        )
        return Question(prompt, draft.answer, draft.answers)

    scores = score_answers(model, tokenizer, map(question, range(examples)), block, batch_size)
    return RulerRecall(task=task, length=length, **scores)


def check_ruler(tokenizer: Any, task: str, *, length: int, examples: int, seed: int, text: str | None) -> None:
    """ValueError unless each of these examples fits into `length` tokens."""
    words, count_tokens = haystack_words(text), token_counter(tokenizer)
    for index in range(examples):
        ruler_draft(task, length=length, seed=seed, index=index, words=words, count_tokens=count_tokens)
