"""Bad arguments of recall tasks, corpora and tokenizers are refused at once, in words of the argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastweights.data import TASKS, make_task, stream
from fastweights.data.text import PackedRows, TextCorpus, TextTokenizer, TokenShards, pack_rows, prepare_text

from ..bad_calls import check_refused

NAN, INFINITY = float("nan"), float("inf")
SIZES = [0, -1, 1.5, "4", None, True, 10**10]


def task(**options: Any) -> Any:
    return make_task(**{"name": "mqar", "pairs": 4, "vocab_size": 128, **options})


def batch(**options: Any) -> Any:
    return task().batch(**{"split": "test", "seed": 0, "index": 0, "batch_size": 2, **options})


def batches(**options: Any) -> Any:
    return stream(**{"task": task(), "split": "train", "seed": 0, "batch_size": 2, "stop": 3, **options})


def tokenize(corpus: Any, tokenizer: Any = None, cache: Any = "tokens") -> Any:
    return prepare_text(corpus, tokenizer or TextTokenizer(vocab_size=300), cache)


@pytest.mark.parametrize("name", TASKS)
def test_every_task(name: str, tmp_path: Path) -> None:
    for field, values in {
        "pairs": SIZES,
        "length": [*SIZES[:4], 10**12],
        "vocab_size": [0, -1, 1.5, "4", 10**12],
    }.items():
        if field == "vocab_size" and not hasattr(TASKS[name], field):
            continue  # a task of vectors
        for value in values:
            check_refused(field, lambda field=field, value=value: task(name=name, **{field: value}), tmp_path)  # type: ignore[misc]


CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "an unknown task": ("the name of a recall task", lambda: task(name="mqra")),
    "a task by number": ("the name of a recall task", lambda: task(name=3)),
    "an unknown option": ("option", lambda: task(power=1)),
    "a length that does not hold the pairs": ("length", lambda: task(length=3)),
    "a power of NaN": ("power_a", lambda: task(power_a=NAN)),
    "a flag by number": ("random_non_queries", lambda: task(random_non_queries=1)),
    "all keys held out": ("held_out_keys", lambda: task(name="mqar-ood", held_out_keys=1.0)),
    "an unknown split": ("split", lambda: batch(split="tset")),
    "a split by number": ("split", lambda: batch(split=0)),
    "a negative seed": ("seed", lambda: batch(seed=-1)),
    "a seed of 2^64": ("seed", lambda: batch(seed=2**64)),
    "a float seed": ("seed", lambda: batch(seed=0.5)),
    "a negative index": ("index", lambda: batch(index=-1)),
    "a batch of none": ("batch_size", lambda: batch(batch_size=0)),
    "a batch of 10^10": ("batch_size", lambda: batch(batch_size=10**10)),
    "a stream of no task": ("task", lambda: batches(task="mqar")),
    "a stream of 10^10 rows": ("batch_size", lambda: batches(batch_size=10**10)),
    "a stream that stops before its start": ("stop", lambda: batches(start=4)),
    "a negative start": ("start", lambda: batches(start=-1)),
    "nothing ahead": ("ahead", lambda: batches(ahead=0)),
    "10^9 batches ahead": ("ahead", lambda: batches(ahead=10**9)),
    "no paths": ("paths", lambda: TextCorpus(paths=3)),  # type: ignore[arg-type]
    "an empty path": ("paths", lambda: TextCorpus(paths=("",))),
    "paths in a dictionary": ("held_out", lambda: TextCorpus(held_out={"a": 1})),  # type: ignore[arg-type]
    "excluded by number": ("excluded", lambda: TextCorpus(excluded=(1,))),  # type: ignore[arg-type]
    "all held out": ("held_out_fraction", lambda: TextCorpus(held_out_fraction=1.0)),
    "held out NaN": ("held_out_fraction", lambda: TextCorpus(held_out_fraction=NAN)),
    "a dataset by number": ("dataset", lambda: TextCorpus(dataset=3)),  # type: ignore[arg-type]
    "a dataset and paths": ("dataset", lambda: TextCorpus(dataset="a", paths=("b",))),
    "a text field by number": ("text_field", lambda: TextCorpus(text_field=3)),  # type: ignore[arg-type]
    "no megabytes": ("max_megabytes", lambda: TextCorpus(max_megabytes=0)),
    "infinite megabytes": ("max_megabytes", lambda: TextCorpus(max_megabytes=INFINITY)),
    "a path that does not exist": ("corpus", lambda: tokenize(TextCorpus(paths=("missing.txt",)))),
    "a corpus by name": ("corpus", lambda: tokenize("text.txt")),
    "an empty file": ("corpus", lambda: tokenize(TextCorpus(paths=("empty.txt",)))),
    "files of spaces": ("corpus", lambda: tokenize(TextCorpus(paths=("spaces",)))),
    "held-out text alone": ("corpus", lambda: tokenize(TextCorpus(paths=("spaces",), held_out=("text.txt",)))),
    "a binary file": ("corpus", lambda: tokenize(TextCorpus(paths=("binary.bin",)))),
    "a tokenizer by name": ("tokenizer", lambda: tokenize(TextCorpus(paths=("text.txt",)), tokenizer="gpt2")),
    "a cache by number": ("cache", lambda: tokenize(TextCorpus(paths=("text.txt",)), cache=3)),
    "a cache that is a file": ("cache", lambda: tokenize(TextCorpus(paths=("text.txt",)), cache="text.txt")),
    "a tokenizer that does not exist": (
        "tokenizer path",
        lambda: tokenize(TextCorpus(paths=("text.txt",)), TextTokenizer(path="missing")),
    ),
    "a tokenizer path by number": ("tokenizer path", lambda: TextTokenizer(path=3)),  # type: ignore[arg-type]
    "no tokenizer path": ("path", lambda: TextTokenizer().load()),
    "a tokenizer by path and name": ("tokenizer name", lambda: TextTokenizer(path="a", name="b")),
    "a revision of a tokenizer that has none": ("tokenizer revision", lambda: TextTokenizer(revision="main")),
    "no process": ("tokenizer processes", lambda: TextTokenizer(processes=0)),
    "an empty vocabulary": ("vocab_size", lambda: TextTokenizer(vocab_size=0)),
    "a vocabulary without the bytes": ("vocab_size", lambda: TextTokenizer(vocab_size=256)),
    "a vocabulary of 10^10": ("vocab_size", lambda: TextTokenizer(vocab_size=10**10)),
    "a vocabulary by name": ("vocab_size", lambda: TextTokenizer(vocab_size="8k")),  # type: ignore[arg-type]
    "no sample": ("sample_megabytes", lambda: TextTokenizer(sample_megabytes=0)),
    "a sample of NaN": ("sample_megabytes", lambda: TextTokenizer(sample_megabytes=NAN)),
    "one text in place of texts": ("texts", lambda: TextTokenizer().train("some text")),
    "numbers in place of texts": ("texts", lambda: TextTokenizer().train([1, 2])),  # type: ignore[list-item]
    "no texts": ("texts", lambda: TextTokenizer().train([])),
    "texts that are not UTF-8": ("texts", lambda: TextTokenizer().train(["a\udcff"])),
    "shards of a folder without any": ("folder", lambda: TokenShards(Path("spaces"), "train")),
    "shards of an unknown split": ("split", lambda: TokenShards(Path("spaces"), "tset")),
    "rows of no shards": ("shards", lambda: PackedRows([1, 2, 3], 2)),  # type: ignore[arg-type]
    "no rows to pack": ("rows", lambda: pack_rows([])),
    "rows without starts": ("rows", lambda: pack_rows([np.arange(4)])),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("spaces").mkdir()
    Path("spaces", "a.txt").write_text(" \n")
    Path("spaces", "b.txt").write_text("")
    Path("text.txt").write_text("some text\n" * 50)
    Path("binary.bin").write_bytes(bytes(range(256)))
    check_refused(*CALLS[name], tmp_path)
