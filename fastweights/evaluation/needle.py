"""Single-needle retrieval: whether a text model finds one sentence again in a long context (RULER's S-NIAH 1 to 3)."""

from __future__ import annotations

from typing import Any

from ..checks import check_number
from ..kinds import checked
from ..results import NeedleRecall
from .answers import Question, check_questions, score_answers, token_counter
from .needle_text import NEEDLE_TASKS, haystack_words, needle_of, needle_prompt
from .reading import check_tokenizer

__all__ = ["DEPTHS", "NEEDLE_TASKS", "NeedleRecall", "check_needles", "needle_recall"]

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
        model: a `FastWeightsForCausalLM`.
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
    check_questions(model, length=length, examples=examples, seed=seed, block=block, batch_size=batch_size)
    check_tokenizer(tokenizer)
    check_number("depth", depth, low=0, high=1)
    words, count_tokens = haystack_words(text), token_counter(tokenizer)

    def question(index: int) -> Question:
        prompt, needle = needle_prompt(
            task, length=length, depth=depth, seed=seed, index=index, words=words, count_tokens=count_tokens
        )
        return Question(prompt, needle.value, [needle.value])

    scores = score_answers(model, tokenizer, map(question, range(examples)), block, batch_size)
    return NeedleRecall(task=task, length=length, depth=depth, **scores)


def check_needles(tokenizer: Any, task: str, *, length: int, examples: int, seed: int) -> None:
    """ValueError unless each of these needles fits with its question into `length` tokens."""
    for index in range(examples):
        needle_of(task, length=length, seed=seed, index=index, count_tokens=token_counter(tokenizer))
