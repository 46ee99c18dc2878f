"""A text model's answers to prompts: how likely the right ones are, and what the model says itself."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F

from ..checks import check_size, check_whole_number
from .reading import MOST_EXAMPLES, check_model, evaluating, hidden_blocks, prompt_tokens, read

__all__ = ["Answer", "Question", "Scores", "answer_prompt", "check_questions", "score_answers", "token_counter"]

_MORE_TOKENS = 16  # tokens generated beyond the answer's own number


class Question(NamedTuple):
    """A prompt, the text that answers it, and the strings that an answer in other words must hold."""

    prompt: str
    answer: str
    wanted: Sequence[str]


class Scores(TypedDict):
    """`found`, `exact` and `answer_loss` of `fastweights.results.NeedleRecall` and `RulerRecall`, over `examples`."""

    examples: int
    found: float
    exact: float
    answer_loss: float


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """The number of tokens of a prompt."""
    return lambda text: len(prompt_tokens(tokenizer, text))


@dataclass(frozen=True)
class Answer:
    """How a model answers a prompt.

    Attributes:
        losses: -ln p of the right answer's tokens.
        exact: whether each of them is the most likely one after the right ones before it.
        continuation: the model's own greedy continuation; empty where it is exact.
    """

    losses: Sequence[float]
    exact: bool
    continuation: str

    def part_found(self, wanted: Sequence[str]) -> float:
        """The part of the strings that stand in the continuation, whatever their case: RULER's score."""
        said = self.continuation.casefold()
        return sum(self.exact or text.casefold() in said for text in wanted) / len(wanted)


def answer_prompt(model: Any, tokenizer: Any, prompt: str, value: str, block: int) -> Answer:
    """The losses of the right answer's tokens, whether each is the most likely one, and what the model itself says."""
    whole = prompt_tokens(tokenizer, f"{prompt} {value}")
    start = len(os.path.commonprefix([whole, prompt_tokens(tokenizer, prompt)]))
    ids = torch.tensor([whole], device=model.device)
    with evaluating(model):
        cache = read(model, ids[:, : start - 1], block)
        answered = hidden_blocks(model, ids[:, start - 1 : -1], block, cache.copy())
        logits = torch.cat([model.lm_head(hidden[0]).float() for _, hidden in answered])
        losses = F.cross_entropy(logits, ids[0, start:], reduction="none").tolist()
        if not all(map(math.isfinite, losses)):
            raise ValueError("model must give finite losses, got NaN or infinite ones; its weights are damaged")
        if torch.equal(logits.argmax(-1), ids[0, start:]):
            return Answer(losses, True, "")
        generated = model.generate(
            ids[:, :start],
            past_key_values=cache,
            max_new_tokens=len(losses) + _MORE_TOKENS,
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        )
    return Answer(losses, False, tokenizer.decode(generated[0, start:], skip_special_tokens=True))


def score_answers(model: Any, tokenizer: Any, questions: Iterable[Question], block: int) -> Scores:
    """The scores of a model's answers to one question or more, which are asked as they come."""
    examples = exact = tokens = 0
    found = loss = 0.0
    for question in questions:
        answer = answer_prompt(model, tokenizer, question.prompt, question.answer, block)
        examples += 1
        exact += answer.exact
        found += answer.part_found(question.wanted)
        tokens += len(answer.losses)
        loss += sum(answer.losses)
    return {"examples": examples, "found": found / examples, "exact": exact / examples, "answer_loss": loss / tokens}


def check_questions(model: object, *, length: object, examples: object, seed: object, block: object) -> None:
    """Refuses arguments of a measure that asks questions about texts."""
    check_model(model)
    check_size("length", length)
    check_size("examples", examples, high=MOST_EXAMPLES)
    check_whole_number("seed", seed)
    check_size("block", block)
