"""The texts of RULER's generated tasks: needles in long texts, variables, common and frequent words."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import numpy as np

from ..checks import check_unicode
from ..data import Draws

__all__ = [
    "NEEDLE_TASKS",
    "RULER_TASKS",
    "Draft",
    "TextTask",
    "documentation",
    "draw_draft",
    "haystack_words",
    "write_prompt",
]

NOISE = "Rain falls on the roof. A road leads to the sea. The clock is slow. We sit and wait. Soon it is night again."
_NEEDLES = 4  # of mk-niah-1, and values or questions of mv-niah and mq-niah
_NEEDLE_TOKENS = 8  # no tokenizer makes fewer of a needle's sentence
_HOPS = 4
_COMMON_WORDS, _COMMON_TIMES, _RARE_TIMES = 10, 30, 3
_FREQUENT_WORDS, _CODE_LETTERS = 3, 6
_ADJECTIVE_WORDS = (
    "amber brave calm dark early fast gentle heavy icy kind late mild narrow old pale quiet red small tall warm"
)
_SINGLE_NOUN_WORDS = (
    "apple bridge candle door eagle forest garden hammer island lamp mountain needle orchard piano river stone"
)
_NOUN_WORDS = (
    "apple arrow basket bell boat bridge candle castle chair cloud coat desk door eagle field flower forest garden glove "
    "hammer harbour horse island kettle lamp letter meadow mirror mountain needle orchard piano pillow river saddle ship "
    "stone tower village window"
)
_ADJECTIVES, _NOUNS, _SINGLE_NOUNS = _ADJECTIVE_WORDS.split(), _NOUN_WORDS.split(), _SINGLE_NOUN_WORDS.split()
_KEYS = len(_ADJECTIVES) * (len(_ADJECTIVES) - 1) * len(_NOUNS)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A prompt whose text may be of any size.

    Attributes:
        introduction, question: what stands before and after the text; the answer follows the question.
        text: the text of a size: words, sentences or entries, as the task has it.
        answers: the strings to be found, in the order in which the question asks for them.
        least, most: smallest and largest size.
    """

    introduction: str
    text: Callable[[int], str]
    question: str
    answers: tuple[str, ...]
    least: int
    most: int

    @property
    def answer(self) -> str:
        """The right answer as a text."""
        return ", ".join(self.answers)

    def prompt(self, size: int) -> str:
        """The whole prompt with a text of `size`; a space and the answer follow."""
        return f"{self.introduction}\n\n{self.text(size)}\n\n{self.question}"

    def tokens(self, size: int, count_tokens: Callable[[str], int]) -> int:
        """Tokens of prompt and answer."""
        return count_tokens(f"{self.prompt(size)} {self.answer}")


def draw_draft(
    task: str, *, length: int, seed: int, index: int, words: Sequence[str], count_tokens: Callable[[str], int],
    **place: float,
) -> Draft:  # fmt: skip
    """An example of a task of NEEDLE_TASKS or RULER_TASKS, which fits into `length` tokens at its smallest size.

    place: `depth`, the part of the text that stands before a single needle, 0 to 1.

    Raises:
        ValueError: a length or words that do not hold the task.
    """
    tasks = {**NEEDLE_TASKS, **RULER_TASKS}
    draws = Draws(seed, 2 + list(tasks).index(task), index)  # streams 0 and 1 are the recall tasks'
    draft = tasks[task].draw(draws, words, length, **place)
    shortest = draft.tokens(draft.least, count_tokens)
    if shortest > length:
        raise ValueError(f"lengths must be at least {shortest} tokens for {task!r} at its smallest, got {length}")
    return draft


def write_prompt(
    task: str, *, length: int, seed: int, index: int, words: Sequence[str], count_tokens: Callable[[str], int],
    **place: float,
) -> tuple[str, Draft]:  # fmt: skip
    """A prompt that with its answer has at most `length` tokens, with as large a text as fits, and the draft that it is of.

    A function of these arguments alone, the same on every machine. Running text starts at a random one of `words`, which are
    repeated when there are too few.
    """
    draft = draw_draft(task, length=length, seed=seed, index=index, words=words, count_tokens=count_tokens, **place)
    sizes = range(draft.least, draft.most + 1)
    fitting = bisect_right(sizes, length, key=partial(draft.tokens, count_tokens=count_tokens))
    return draft.prompt(sizes[fitting - 1]), draft


def _single_needle(
    draws: Draws, words: Sequence[str], length: int, *, what: str, in_noise: bool, depth: float = 0.5
) -> Draft:
    """One secret number of seven digits, or UUID (version 4), behind the last sentence end in the first `depth` of the text."""
    adjective, noun = (known[draws.below(len(known), 1)[0]] for known in (_ADJECTIVES, _SINGLE_NOUNS))
    if what == "number":
        value = str(10**6 + draws.below(9 * 10**6, 1)[0])
    else:
        value = str(UUID(bytes=draws.below(256, 16).astype("uint8").tobytes(), version=4))
    words = NOISE.split() if in_noise else words
    start = 0 if in_noise else int(draws.below(len(words), 1)[0])
    secret = f"secret {what} of the {adjective} {noun}"
    return Draft(
        introduction=f"A secret {what} is hidden in this text. Keep it in mind, you will be asked for it.",
        text=lambda size: _hide(_repeat(words, start, size), [f"The {secret} is {value}."], [depth]),
        question=f"What is the {secret}? The {secret} is",
        answers=(value,),
        least=0,
        most=length - 1,
    )


def _needles(
    draws: Draws, words: Sequence[str], length: int, *, keys: int = 1, values: int = 1, asked: int = 1
) -> Draft:
    """`keys` needles of `values` values each in running text, at random sentence ends; the first `asked` keys are asked for."""
    names = [_key(number) for number in draws.distinct(_KEYS, 1, keys)[0]]
    numbers = [str(10**6 + number) for number in draws.distinct(9 * 10**6, 1, keys * values)[0]]
    depths = draws.below(2**20, keys * values) / 2**20
    start = int(draws.below(len(words), 1)[0])
    order = np.argsort(depths, kind="stable").tolist()
    owner = [place // values for place in range(keys * values)]
    sentences = [f"The secret number of {names[owner[place]]} is {numbers[place]}." for place in order]

    def text(size: int) -> str:
        return _hide(_repeat(words, start, size), sentences, depths[order])

    wanted = order if values > 1 else range(asked)
    return _secret_question(
        [names[place] for place in range(asked)],
        tuple(numbers[place] for place in wanted if owner[place] < asked),
        text,
        what="number",
        most=length,
    )


def _needle_haystack(draws: Draws, words: Sequence[str], length: int, *, what: str) -> Draft:
    """Nothing but needles, one of which is asked for. Keys are words and values numbers, or both are UUIDs."""
    most = min(max(length // _NEEDLE_TOKENS, 1), _KEYS)
    if what == "number":
        keys = [_key(number) for number in draws.distinct(_KEYS, 1, most)[0]]
        values = [str(10**6 + number) for number in draws.distinct(9 * 10**6, 1, most)[0]]
    else:
        codes = draws.below(256, (2, most, 16)).astype("uint8")
        keys, values = ([str(UUID(bytes=code.tobytes(), version=4)) for code in half] for half in codes)
    depth = draws.below(2**20, 1)[0] / 2**20
    asked, *others = [f"The secret {what} of {key} is {value}." for key, value in zip(keys, values, strict=True)]

    def text(size: int) -> str:
        place = round(depth * size)
        return " ".join([*others[:place], asked, *others[place:size]])

    return _secret_question(keys[:1], tuple(values[:1]), text, what=what, most=most - 1)


def _secret_question(
    keys: Sequence[str], answers: tuple[str, ...], text: Callable[[int], str], *, what: str, most: int
) -> Draft:
    plural = "s" if len(answers) > 1 else ""
    asked = f"secret {what}{plural} of {_list_names(keys)} {'are' if plural else 'is'}"
    order = ", in the order in which they are named" if len(keys) > 1 else " in the order of the text" if plural else ""
    return Draft(
        introduction=f"Secret {what}s are hidden in this text. Keep them in mind, you will be asked for some of them.",
        text=text,
        question=f"Name the secret {what}{plural} of {_list_names(keys)}{order}. The {asked}",
        answers=answers,
        least=0,
        most=most,
    )


def _variables(draws: Draws, words: Sequence[str], length: int) -> Draft:
    """A variable with a value and a chain of copies of it, in order, among sentences that repeat."""
    names = ["".join(chr(ord("A") + number // 26**place % 26) for place in range(5))
             for number in draws.distinct(26**5, 1, _HOPS + 1)[0].tolist()]  # fmt: skip
    value = str(10**4 + draws.below(9 * 10**4, 1)[0])
    depths = np.sort(draws.below(2**20, _HOPS + 1)) / 2**20
    sources = [value, *(f"VAR {name}" for name in names)]
    statements = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    noise = NOISE.split()
    return Draft(
        introduction="Variables are assigned in this text. Keep track of their values.",
        text=lambda size: _hide(_repeat(noise, 0, size), statements, depths),
        question=f"Name all variables that have the value {value}, in the order of their assignment. The variables that have "
        f"the value {value} are",
        answers=tuple(names),
        least=0,
        most=length,
    )


def _common_words(draws: Draws, words: Sequence[str], length: int) -> Draft:
    """A numbered list in random order: ten words that stand in it 30 times, others 3 times."""
    known = sorted({word for word in words if re.fullmatch("[a-z]{3,}", word)})
    if len(known) < 2 * _COMMON_WORDS:
        raise ValueError(
            f"text must hold at least {2 * _COMMON_WORDS} different words of small letters for 'cwe', got {len(known)}; pass "
            "a longer text"
        )
    most = min(len(known) - _COMMON_WORDS, max(length // (2 * _RARE_TIMES), _COMMON_WORDS))
    common, rare = np.split(draws.distinct(len(known), 1, _COMMON_WORDS + most)[0], [_COMMON_WORDS])
    frequent = np.repeat(np.sort(common), _COMMON_TIMES)
    ranks = draws.below(2**62, len(frequent) + most * _RARE_TIMES)

    def text(size: int) -> str:
        entries = np.concatenate([frequent, np.repeat(rare[:size], _RARE_TIMES)])
        order = np.argsort(ranks[: len(entries)], kind="stable")
        return " ".join(f"{number}. {known[entry]}" for number, entry in enumerate(entries[order], 1))

    return Draft(
        introduction="This is a numbered list of words. Some words stand in it more often than others. Keep these in mind.",
        text=text,
        question=f"Name the {_COMMON_WORDS} most common words of the list in alphabetical order. The {_COMMON_WORDS} most common "
        "words are",
        answers=tuple(known[entry] for entry in np.sort(common)),
        least=_COMMON_WORDS,
        most=most,
    )


def _frequent_words(draws: Draws, words: Sequence[str], length: int) -> Draft:
    """Made-up words in random order, the k-th of n with the frequency 1 / (k^2 zeta(2)); the first one is dots."""
    most = max(length, 60)
    count = math.isqrt(most) + 1
    codes = draws.distinct(26**_CODE_LETTERS, 1, count)[0].tolist()
    coded = ["".join(chr(ord("a") + code // 26**place % 26) for place in range(_CODE_LETTERS)) for code in codes]
    coded[0] = "..."
    ranks = draws.below(2**62, most)

    def text(size: int) -> str:
        times = [int(size * 6 / (math.pi * place) ** 2) for place in range(1, count + 1)]
        entries = np.repeat(np.arange(count), times)
        return " ".join(coded[entry] for entry in entries[np.argsort(ranks[: len(entries)], kind="stable")])

    return Draft(
        introduction="This is a text of coded words. Keep track of how often each word stands in it. Dots are no word.",
        text=text,
        question=f"Name the {_FREQUENT_WORDS} most frequent coded words, the most frequent one first. The {_FREQUENT_WORDS} most "
        "frequent coded words are",
        answers=tuple(coded[1 : 1 + _FREQUENT_WORDS]),
        least=60,  # from here on the third answer is more frequent than the word after it
        most=most,
    )


@dataclass(frozen=True)
class TextTask:
    """A task: what it asks, and its examples: a draft from random draws, the words of the text and the length."""

    summary: str
    draw: Callable[..., Draft]


NEEDLE_TASKS = {
    "s-niah-1": TextTask("a number in sentences that repeat", partial(_single_needle, what="number", in_noise=True)),
    "s-niah-2": TextTask("a number in text", partial(_single_needle, what="number", in_noise=False)),
    "s-niah-3": TextTask("a UUID in text", partial(_single_needle, what="UUID", in_noise=False)),
}
RULER_TASKS = {
    "mk-niah-1": TextTask("one of four numbers in text", partial(_needles, keys=_NEEDLES)),
    "mk-niah-2": TextTask("one number among nothing but numbers", partial(_needle_haystack, what="number")),
    "mk-niah-3": TextTask("the UUID of a UUID among nothing but UUIDs", partial(_needle_haystack, what="UUID")),
    "mv-niah": TextTask("four numbers of one key in text", partial(_needles, values=_NEEDLES)),
    "mq-niah": TextTask("the numbers of four keys in text", partial(_needles, keys=_NEEDLES, asked=_NEEDLES)),
    "vt": TextTask("all variables that a value was handed on to", _variables),
    "cwe": TextTask("the ten most common words of a list", _common_words),
    "fwe": TextTask("the three most frequent coded words", _frequent_words),
}


def _key(number: int) -> str:
    """One of _KEYS names: two different adjectives and a noun."""
    rest, noun = divmod(int(number), len(_NOUNS))
    first, second = divmod(rest, len(_ADJECTIVES) - 1)
    second += second >= first
    return f"the {_ADJECTIVES[first]} {_ADJECTIVES[second]} {_NOUNS[noun]}"


def _repeat(words: Sequence[str], start: int, size: int) -> list[str]:
    """`size` words from `start` on, from the first again behind the last."""
    return [words[(start + place) % len(words)] for place in range(size)]


def _hide(text: list[str], sentences: Sequence[str], depths: Sequence[float] | np.ndarray) -> str:
    """The words with each sentence behind the last sentence end before its depth; depths rise."""
    places = [_sentence_end(text, depth) for depth in depths]
    for place, sentence in zip(reversed(places), reversed(sentences), strict=True):
        text.insert(place, sentence)
    return " ".join(text)


def _sentence_end(text: Sequence[str], depth: float) -> int:
    """The place in `text`, a list of words, behind the last sentence end in its first `depth` (0 to 1)."""
    place = round(depth * len(text))
    while 0 < place < len(text) and not text[place - 1].endswith((".", "!", "?")):
        place -= 1
    return place


def _list_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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
