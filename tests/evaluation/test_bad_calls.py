"""Bad settings and arguments of evaluations are refused before a model reads anything, in words of the argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastweights.data import make_task
from fastweights.evaluation import (
    EvaluationSettings,
    continue_text,
    needle_recall,
    perplexity_by_length,
    recall_accuracy,
    ruler_recall,
    word_recall,
)

from ..bad_calls import check_refused
from .small import model, tokenizer

NAN = float("nan")
SIZES = [0, -1, 1.5, "4", None]
MODEL, TOKENIZER = model(), tokenizer()

FIELDS: dict[str, list[Any]] = {
    "measures": ["perplexity", (3,), 3, ("perplexity", "perplexity")],
    "a measure": [("perplexty",)],
    "lengths": [(), 512, "512", (1,), (1.5,), ("512",), (-4,)],
    "texts": SIZES,
    "stretch": SIZES,
    "batch_size": SIZES,
    "pairs": SIZES,
    "symbols": SIZES,
    "recall_examples": [*SIZES, 10**10],
    "needle_examples": [*SIZES, 10**10],
    "ruler_examples": [*SIZES, 10**10],
    "depths": ["0.5", 0.5, (-0.1,), (1.1,), (NAN,), ("0",)],
    "seed": [-1, 0.5, "0", None],
    "block": SIZES,
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in FIELDS.items() for value in values])
def test_settings(field: str, value: Any, tmp_path: Path) -> None:
    name = "measures" if field == "a measure" else field
    check_refused(field, lambda: EvaluationSettings(**{name: value}), tmp_path)


def perplexity(**options: Any) -> Any:
    given = {"documents": [list(range(40))], "lengths": [8], **options}
    return perplexity_by_length(given.pop("model", MODEL), given.pop("documents"), given.pop("lengths"), **given)


def text(**options: Any) -> Any:
    given = {"prompt": "Once", "max_new_tokens": 2, "greedy": True, **options}
    return continue_text(given.pop("model", MODEL), given.pop("tokenizer", TOKENIZER), given.pop("prompt"), **given)


def needle(**options: Any) -> Any:
    given = {"task": "s-niah-1", "length": 200, "examples": 1, **options}
    return needle_recall(MODEL, given.pop("tokenizer", TOKENIZER), given.pop("task"), **given)


def ruler(**options: Any) -> Any:
    given = {"task": "vt", "length": 400, "examples": 1, **options}
    return ruler_recall(given.pop("model", MODEL), TOKENIZER, given.pop("task"), **given)


def words(**options: Any) -> Any:
    given = {"task": "mqar", "pairs": 2, "symbols": 16, "examples": 1, **options}
    return word_recall(MODEL, TOKENIZER, given.pop("task"), **given)


def accuracy(**options: Any) -> Any:
    given = {"task": make_task("mqar", pairs=2, vocab_size=32), "seed": 0, "examples": 2, **options}
    return recall_accuracy(given.pop("model", MODEL), given.pop("task"), **given)


CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "perplexity of a model by name": ("model", lambda: perplexity(model="gdn")),
    "documents in a string": ("documents", lambda: perplexity(documents="some text")),
    "documents of text": ("documents", lambda: perplexity(documents=["some text"])),
    "documents of floats": ("documents", lambda: perplexity(documents=[[0.5] * 40])),
    "documents outside the vocabulary": ("documents", lambda: perplexity(documents=[[10**6] * 40])),
    "documents that are too short": ("documents", lambda: perplexity(documents=[[1, 2]])),
    "no documents": ("documents", lambda: perplexity(documents=[])),
    "a length of 10^12": ("lengths", lambda: perplexity(lengths=[10**12])),
    "lengths by number": ("lengths", lambda: perplexity(lengths=8)),
    "a separator outside the vocabulary": ("separator", lambda: perplexity(separator=10**6)),
    "a float separator": ("separator", lambda: perplexity(separator=0.5)),
    "no rows at a time": ("batch_size", lambda: perplexity(batch_size=0)),
    "a block of half a token": ("block", lambda: perplexity(block=0.5)),
    "a continuation by a name": ("model", lambda: text(model="gdn")),
    "a prompt that is not UTF-8": ("prompt", lambda: text(prompt="a\udcff")),
    "a prompt of bytes": ("prompt", lambda: text(prompt=b"Once")),
    "no prompt": ("prompt", lambda: text(prompt=None)),
    "fewer than no tokens": ("max_new_tokens", lambda: text(max_new_tokens=-1)),
    "a flag by name": ("greedy", lambda: text(greedy="yes")),
    "a temperature of 0": ("temperature", lambda: text(greedy=False, temperature=0)),
    "a temperature of NaN": ("temperature", lambda: text(greedy=False, temperature=NAN)),
    "a top_p of 2": ("top_p", lambda: text(greedy=False, top_p=2)),
    "a negative seed": ("seed", lambda: text(greedy=False, seed=-1)),
    "an unknown needle task": ("the name of a needle task", lambda: needle(task="s-niah-9")),
    "a length without room": ("lengths", lambda: needle(length=3)),
    "a depth of 2": ("depth", lambda: needle(depth=2)),
    "no needles at a time": ("batch_size", lambda: needle(batch_size=0)),
    "half a RULER text at a time": ("batch_size", lambda: ruler(batch_size=0.5)),
    "10^10 needles": ("examples", lambda: needle(examples=10**10)),
    "text of spaces": ("text", lambda: needle(task="s-niah-2", text="  ")),
    "text by number": ("text", lambda: needle(task="s-niah-2", text=3)),
    "text that is not UTF-8": ("text", lambda: needle(task="s-niah-2", text="a\udcff")),
    "an unknown RULER task": ("the name of a RULER task", lambda: ruler(task="vtt")),
    "RULER of a model by name": ("model", lambda: ruler(model="gdn")),
    "RULER without room": ("lengths", lambda: ruler(length=3)),
    "RULER on 10^10 texts": ("examples", lambda: ruler(examples=10**10)),
    "RULER in blocks of 0": ("block", lambda: ruler(block=0)),
    "RULER from a negative seed": ("seed", lambda: ruler(seed=-1)),
    "RULER on text by number": ("text", lambda: ruler(task="cwe", text=3)),
    "RULER on text that is not UTF-8": ("text", lambda: ruler(task="mv-niah", text="a\udcff")),
    "an unknown word task": ("the name of a recall task in words", lambda: words(task="mqra")),
    "10^10 sequences of words": ("examples", lambda: words(examples=10**10)),
    "symbols that the tokenizer lacks": ("symbols", lambda: words(symbols=10**6)),
    "more pairs than symbols": ("symbols", lambda: words(pairs=9)),
    "a negative seed of words": ("seed", lambda: words(seed=-1)),
    "accuracy of a model by name": ("model", lambda: accuracy(model="gdn")),
    "accuracy on a task by name": ("task", lambda: accuracy(task="mqar")),
    "accuracy on nothing": ("examples", lambda: accuracy(examples=0)),
    "accuracy on 10^10 examples": ("examples", lambda: accuracy(examples=10**10)),
    "accuracy from a negative seed": ("seed", lambda: accuracy(seed=-1)),
    "accuracy in blocks of 0": ("block", lambda: accuracy(block=0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(*CALLS[name], tmp_path)
