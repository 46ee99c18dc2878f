"""RULER's generated tasks for text models of any size: whether a model finds in a long text what it is asked for."""

from __future__ import annotations

from typing import Any

from ..checks import check_choice, check_number
from ..kinds import checked
from ..results import NeedleRecall, RulerRecall
from .answers import Question, Scores, check_questions, score_answers, token_counter
from .reading import check_tokenizer
from .ruler_text import NEEDLE_TASKS, RULER_TASKS, draw_draft, haystack_words, write_prompt

__all__ = [
    "DEPTHS",
    "NEEDLE_TASKS",
    "RULER_TASKS",
    "NeedleRecall",
    "RulerRecall",
    "check_fit",
    "needle_recall",
    "ruler_recall",
]

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@checked
def needle_recall(
    model: Any,
    tokenizer: Any,
    task: str,
    *,
    length: int,
    depth: float = 0.5,
    examples: int = 10,
    seed: int = 0,
    text: str | None = None,
    block: int = 512,
    batch_size: int = 1,
) -> NeedleRecall:
    """Ask a model for `examples` needles at `depth` of texts of `length` tokens.

    The tasks are those of RULER (Hsieh et al. 2024, appendix B) in words of our own: s-niah-1 hides a number of seven digits in
    a few sentences that repeat, s-niah-2 hides one in running text, s-niah-3 a UUID in running text. The prompt ends with the
    words that stand before the value in the needle, so that a model without instruction tuning can answer. Examples are a
    function of task, length, depth, seed, text and tokenizer. The prompt is read in blocks through the model's cache.

    Args:
        model: a `FastWeightsForCausalLM` or another causal language model of transformers.
        tokenizer: its transformers tokenizer.
        task: "s-niah-1", "s-niah-2" or "s-niah-3".
        length: tokens of prompt and answer together, at most; a text is filled up word by word.
        depth: part of the text that stands before the needle, 0 to 1.
        text: what to hide the needle in, in s-niah-2 and 3; Python's language reference when None.
        block: tokens to read at a time.
        batch_size: prompts to read at a time. Memory grows with it; results are those of one at a time, but for rounding.

    Raises:
        ValueError: an argument out of its range, a text without a word, a length that does not hold the question, a model
            whose losses are not finite.
    """
    check_number("depth", depth, low=0, high=1)
    check_choice("the name of a needle task", task, NEEDLE_TASKS)
    settings = {"length": length, "examples": examples, "seed": seed, "block": block, "batch_size": batch_size}
    scores = _ask(model, tokenizer, task, text, settings, depth=depth)
    return NeedleRecall(task=task, length=length, depth=depth, **scores)


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
        model: a `FastWeightsForCausalLM` or another causal language model of transformers.
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
    check_choice("the name of a RULER task", task, RULER_TASKS)
    settings = {"length": length, "examples": examples, "seed": seed, "block": block, "batch_size": batch_size}
    return RulerRecall(task=task, length=length, **_ask(model, tokenizer, task, text, settings))


def _ask(model: Any, tokenizer: Any, task: str, text: str | None, settings: dict[str, int], **place: float) -> Scores:
    """The scores of the answers to the questions of a task."""
    check_questions(model, **settings)
    check_tokenizer(tokenizer)
    words, count_tokens = haystack_words(text), token_counter(tokenizer)

    def question(index: int) -> Question:
        prompt, draft = write_prompt(
            task, length=settings["length"], seed=settings["seed"], index=index, words=words, count_tokens=count_tokens,
            **place,
        )  # fmt: skip
        return Question(prompt, draft.answer, draft.answers)

    questions = map(question, range(settings["examples"]))
    return score_answers(model, tokenizer, questions, settings["block"], settings["batch_size"])


def check_fit(tokenizer: Any, task: str, *, length: int, examples: int, seed: int, text: str | None) -> None:
    """ValueError unless each of these examples fits into `length` tokens."""
    words, count_tokens = haystack_words(text), token_counter(tokenizer)
    for index in range(examples):
        draw_draft(task, length=length, seed=seed, index=index, words=words, count_tokens=count_tokens)
