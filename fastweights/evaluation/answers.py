"""A text model's answers to prompts: how likely the right ones are, and what the model says itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..checks import LARGEST_COUNT, check_size, check_whole_number
from .causal_models import copy_cache, token_logits
from .divided import Reply, Tokens, answer_divided, is_divided
from .reading import MOST_EXAMPLES, check_losses, check_model, evaluating, hidden_blocks, prompt_tokens, read

__all__ = [
    "Answer",
    "Question",
    "Scores",
    "answer_prompts",
    "check_questions",
    "padded",
    "score_answers",
    "score_continuations",
    "token_counter",
]

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


def answer_prompts(model: Any, tokenizer: Any, questions: Sequence[Question], block: int) -> list[Answer]:
    """Ask questions together, in the rows of one batch; prompts of different lengths are padded."""
    prompts, answers = zip(*(_tokens(tokenizer, question) for question in questions))
    end = model.generation_config.eos_token_id
    ends = [end] if isinstance(end, int) else end or []
    ask = answer_divided if is_divided(model) else _answer_with_cache
    with evaluating(model):
        replies = ask(model, prompts, answers, most=max(map(len, answers)) + _MORE_TOKENS, ends=ends, block=block)
    found = []
    for losses, exact, new in replies:
        said = _until_end(new, len(losses) + _MORE_TOKENS, ends)
        found.append(Answer(losses, exact, "" if exact else tokenizer.decode(said, skip_special_tokens=True)))
    return found


def _answer_with_cache(
    model: Any, prompts: Tokens, answers: Tokens, *, most: int, ends: Sequence[int], block: int
) -> list[Reply]:
    """As `answer_divided`, reading through the model's cache. The model generates where one answer is not exact."""
    ids, mask = padded(prompts, model.device, left=True)
    cache = read(model, ids[:, :-1], block, mask[:, :-1])
    scores = score_continuations(model, copy_cache(cache), prompts, answers, block)
    if all(exact for _, exact in scores):
        return [(losses, True, []) for losses, _ in scores]
    generated = model.generate(
        ids,
        past_key_values=cache,
        attention_mask=mask,
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,  # behind the end of a text, where nothing is read
    )
    said = generated[:, ids.shape[1] :].tolist()
    return [(losses, exact, new) for (losses, exact), new in zip(scores, said)]


def score_continuations(
    model: Any, cache: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], block: int
) -> list[tuple[list[float], bool]]:
    """-ln p of the tokens of each answer, and whether each token is the most likely one after the right ones before it.

    cache: has read each prompt but its last token, and is advanced. An answer holds one token or more. Logits exist for the
    tokens of one block of answers at a time.

    Raises:
        ValueError: the model's losses are not finite.
    """
    # What the answers are predicted from: the prompt's last token and, of each answer, all tokens but the last.
    # Padding behind them changes nothing before it.
    follows, _ = padded([(p[-1], *a[:-1]) for p, a in zip(prompts, answers)], model.device)
    columns = torch.arange(1 - cache.get_seq_length(), follows.shape[1] + 1, device=model.device)
    mask = (
        columns + torch.tensor([[len(p) - 1] for p in prompts], device=model.device) > 0
    )  # prompts end where answers begin
    wanted, asked = padded(answers, model.device)
    losses, likeliest = [], []
    for start, hidden_BTD in hidden_blocks(model, follows, block, cache, mask.long()):
        logits_BTV = token_logits(model, hidden_BTD)
        wanted_BT = wanted[:, start : start + hidden_BTD.shape[1]]
        losses.append(F.cross_entropy(logits_BTV.transpose(1, 2), wanted_BT, reduction="none"))
        likeliest.append(logits_BTV.argmax(-1) == wanted_BT)
    losses_BT, likeliest_BT = torch.cat(losses, 1), torch.cat(likeliest, 1) | ~asked.bool()
    check_losses(losses_BT[asked.bool()])
    rows = zip(losses_BT.tolist(), likeliest_BT.all(1).tolist(), answers)
    return [(row[: len(answer)], exact) for row, exact, answer in rows]


def _tokens(tokenizer: Any, question: Question) -> tuple[list[int], list[int]]:
    """The tokens of prompt and answer. Where the answer changes how the prompt's end is cut, that end counts as the answer's."""
    whole = prompt_tokens(tokenizer, f"{question.prompt} {question.answer}")
    start = len(os.path.commonprefix([whole, prompt_tokens(tokenizer, question.prompt)]))
    return whole[:start], whole[start:]


def padded(rows: Sequence[Sequence[int]], device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], filled up with zeros, and a mask [B, T] that is 0 there."""
    fill = partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
    ids = [torch.tensor(row) for row in rows]
    return fill(ids).to(device), fill([torch.ones_like(row) for row in ids]).to(device)


def _until_end(tokens: list[int], most: int, ends: Sequence[int]) -> list[int]:
    """The first tokens, `most` of them, or up to one that ends the text: what stands behind it fills up the batch."""
    place = next((place for place, token in enumerate(tokens[:most], 1) if token in ends), most)
    return tokens[:place]


def score_answers(model: Any, tokenizer: Any, questions: Iterable[Question], block: int, batch_size: int = 1) -> Scores:
    """The scores of a model's answers to one question or more, which are asked as they come, `batch_size` at a time."""
    examples = exact = tokens = 0
    found = loss = 0.0
    waiting = iter(questions)
    while together := list(islice(waiting, batch_size)):
        for question, answer in zip(together, answer_prompts(model, tokenizer, together, block)):
            examples += 1
            exact += answer.exact
            found += answer.part_found(question.wanted)
            tokens += len(answer.losses)
            loss += sum(answer.losses)
    return {"examples": examples, "found": found / examples, "exact": exact / examples, "answer_loss": loss / tokens}


def check_questions(
    model: object, *, length: object, examples: object, seed: object, block: object, batch_size: object
) -> None:
    """Refuses arguments of a measure that asks questions about texts."""
    check_model(model)
    check_size("length", length, high=LARGEST_COUNT)
    check_size("examples", examples, high=MOST_EXAMPLES)
    check_whole_number("seed", seed)
    check_size("block", block)
    check_size("batch_size", batch_size, high=MOST_EXAMPLES)
