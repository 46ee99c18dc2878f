"""The text of `linearization.py`: source code, and generated documents that ask for what stands in them.

Source code alone teaches no model of this size to answer such questions. The documents have the form of the library's tasks
mk-niah-2 and s-niah-1, with numbers that no measurement asks for: `fastweights.evaluation` draws examples from another seed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

from fastweights.data import Draws
from fastweights.data.text import TextCorpus, TextSource, pytorch_source
from fastweights.evaluation.ruler_text import Draft, write_prompt
from fastweights.files import write_bytes

__all__ = [
    "CHARACTERS",
    "CODE",
    "DOCUMENTS",
    "LENGTHS",
    "NEEDLE",
    "RECALL",
    "documents",
    "with_recall",
    "write_recall",
]

CODE = TextSource(paths=pytorch_source().paths, max_megabytes=60)
CODE_ROWS = 4  # for each row of documents that ask for recall
DOCUMENTS = 42_000  # 8M tokens: a teacher of 32M tokens, a fifth of them recall, reads none twice
# Tokens of a document; of each length there are as many tokens in all.
LENGTHS = (*11 * (96,), *8 * (128,), *4 * (256,), *2 * (512,), 1024)
# Tokens of a document for each question: only answers teach recall, but with fewer there is room for more numbers.
QUESTION_EVERY = (25, 50)
RECALL, NEEDLE = "mk-niah-2", "s-niah-1"
SEED = 1  # examples that are measured have seed 0
STREAM = 1000  # of draws; tasks have those below
CHARACTERS = 4  # per token of this text
LINE = 13  # tokens of an answer and the words before it
FACT = re.compile(r"The secret number of [a-z ]+ is \d+")
RARELY = 1e-6  # the held-out part, of which one document is left: the held-out text is source code


def with_recall(recall: str | Path, code: TextSource = CODE) -> TextCorpus:
    """`CODE_ROWS` rows of source code for each row of the documents that `write_recall` has written."""
    asked = TextSource(paths=(str(recall),), held_out_fraction=RARELY)
    return TextCorpus(sources=(dataclasses.replace(code, weight=CODE_ROWS), asked))


def write_recall(path: Path, count: int = DOCUMENTS) -> None:
    """Write the documents as JSON lines, unless they are there: tokens are made again for a file of another time."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, "".join(json.dumps({"text": text}) + "\n" for text in documents(count)).encode())


def documents(count: int = DOCUMENTS) -> Iterator[str]:
    """Documents of about `LENGTHS` tokens, three of four with several numbers and several questions."""
    for index in range(count):
        draws = Draws(SEED, STREAM, index)
        kind, size, every, depth = (int(draws.below(n, 1)[0]) for n in (4, len(LENGTHS), len(QUESTION_EVERY), 2**20))
        length = LENGTHS[size]
        if kind == 0:
            yield _answered(*_prompt(NEEDLE, length, index, depth=depth / 2**20))
        else:
            questions = length // QUESTION_EVERY[every]
            prompt, draft = _prompt(RECALL, length - (questions - 1) * LINE, index)
            yield _answered(prompt, draft) + _more_answers(prompt, draft, questions - 1, draws)


def _prompt(task: str, length: int, index: int, **place: float) -> tuple[str, Draft]:
    """An example of a task, whose tokens are counted by characters."""
    return write_prompt(
        task, length=length, seed=SEED, index=index, words=("none",), count_tokens=lambda text: len(text) // CHARACTERS,
        **place,
    )  # fmt: skip


def _answered(prompt: str, draft: Draft) -> str:
    return f"{prompt} {draft.answer}"


def _more_answers(prompt: str, draft: Draft, count: int, draws: Draws) -> str:
    """`count` lines with numbers of the text, each behind the words that the question ends with. All numbers come once before one
    comes again."""
    facts = FACT.findall(prompt)
    rounds = draws.distinct(len(facts), -(-count // len(facts)), len(facts)).flatten()[:count].tolist()
    return "".join(f"\n{facts[place]}" for place in rounds)
