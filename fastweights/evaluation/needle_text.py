"""The texts of single-needle retrieval: one sentence with a secret in a long text, and a question about it at the end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from ..checks import check_choice, check_unicode
from ..data._draws import Draws

__all__ = [
    "NEEDLE_TASKS",
    "NOISE",
    "Needle",
    "documentation",
    "haystack_words",
    "needle_of",
    "needle_prompt",
    "sentence_end",
]

NOISE = "Rain falls on the roof. A road leads to the sea. The clock is slow. We sit and wait. Soon it is night again."
_ADJECTIVES = (
    "amber brave calm dark early fast gentle heavy icy kind late mild narrow old pale quiet red small tall warm"
)
_NOUNS = "apple bridge candle door eagle forest garden hammer island lamp mountain needle orchard piano river stone"


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """RULER's single-needle tasks: the kind of text and the kind of needle."""

    summary: str
    in_noise: bool
    value: str


NEEDLE_TASKS = {
    "s-niah-1": NeedleTask(summary="a number in sentences that repeat", in_noise=True, value="number"),
    "s-niah-2": NeedleTask(summary="a number in text", in_noise=False, value="number"),
    "s-niah-3": NeedleTask(summary="a UUID in text", in_noise=False, value="UUID"),
}


@dataclass(frozen=True, kw_only=True)
class Needle:
    """The secret `value` of `key`, and the texts around it."""

    what: str
    key: str
    value: str

    @classmethod
    def draw(cls, what: str, draws: Draws) -> Needle:
        """A key of two words and a value: a number of seven digits or a random UUID (version 4)."""
        adjective, noun = (words[draws.below(len(words), 1)[0]] for words in (_ADJECTIVES.split(), _NOUNS.split()))
        if what == "number":
            value = str(10**6 + draws.below(9 * 10**6, 1)[0])
        else:
            value = str(UUID(bytes=draws.below(256, 16).astype("uint8").tobytes(), version=4))
        return cls(what=what, key=f"the {adjective} {noun}", value=value)

    @property
    def introduction(self) -> str:
        return f"A secret {self.what} is hidden in this text. Keep it in mind, you will be asked for it.\n\n"

    @property
    def sentence(self) -> str:
        return f"The secret {self.what} of {self.key} is {self.value}."

    @property
    def question(self) -> str:
        """The end of the prompt; the answer is a space and the value."""
        return f"\n\nWhat is the secret {self.what} of {self.key}? The secret {self.what} of {self.key} is"

    def prompt(self, text: Sequence[str]) -> str:
        """The whole prompt; `text` are words, the needle's sentence among them."""
        return self.introduction + " ".join(text) + self.question


def needle_of(
    task: str, *, length: int, seed: int, index: int, count_tokens: Callable[[str], int]
) -> tuple[Needle, Draws]:
    """The needle of an example, and the draws for the text around it.

    Raises:
        ValueError: an unknown task, or a length that does not hold the needle, the question and the answer.
    """
    check_choice("the name of a needle task", task, NEEDLE_TASKS)
    draws = Draws(seed, 2 + list(NEEDLE_TASKS).index(task), index)  # streams 0 and 1 are the recall tasks'
    needle = Needle.draw(NEEDLE_TASKS[task].value, draws)
    shortest = count_tokens(f"{needle.prompt([needle.sentence])} {needle.value}")
    if shortest > length:
        raise ValueError(
            f"lengths must be at least {shortest} tokens for {task!r}, the needle and the question alone, got {length}"
        )
    return needle, draws


def needle_prompt(
    task: str,
    *,
    length: int,
    depth: float,
    seed: int,
    index: int,
    words: Sequence[str],
    count_tokens: Callable[[str], int],
) -> tuple[str, Needle]:
    """A prompt that with its answer has at most `length` tokens and as many of the text's words as fit, and its needle.

    A function of these arguments alone, the same on every machine. The text starts at a random one of `words`, which are
    repeated when there are too few (in s-niah-1 they are repeated sentences from the start). The needle follows the
    last sentence end in the first `depth` (0 to 1) of the text.

    Raises:
        ValueError: an unknown task, or a length that does not hold the needle and the question.
    """
    needle, draws = needle_of(task, length=length, seed=seed, index=index, count_tokens=count_tokens)
    in_noise = NEEDLE_TASKS[task].in_noise
    words = NOISE.split() if in_noise else words
    start = 0 if in_noise else int(draws.below(len(words), 1)[0])

    def prompt(count: int) -> str:
        text = [words[(start + place) % len(words)] for place in range(count)]
        text.insert(sentence_end(text, depth), needle.sentence)
        return needle.prompt(text)

    def tokens(count: int) -> int:
        return count_tokens(f"{prompt(count)} {needle.value}")

    return prompt(bisect_right(range(length), length, key=tokens) - 1), needle


def sentence_end(text: Sequence[str], depth: float) -> int:
    """The place in `text`, a list of words, behind the last sentence end in its first `depth` (0 to 1)."""
    place = round(depth * len(text))
    while 0 < place < len(text) and not text[place - 1].endswith((".", "!", "?")):
        place -= 1
    return place


def haystack_words(text: str | None) -> list[str]:
    """The words of the text that needles are hidden in: `documentation` when None."""
    words = (documentation() if text is None else check_unicode("text", text)).split()
    if not words:
        raise ValueError("text must hold at least one word, got none; pass text to hide needles in")
    return words


def documentation() -> str:
    """Python's language reference, which every Python installation has (the texts of `help()`): some 700,000 characters."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
