"""Classification from as many examples as fit into a prompt, as in HELMET (Yen et al. 2025, arXiv 2410.02694)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset, load_dataset

from fastweights.evaluation.tasks.filling import fill, token_counter

__all__ = ["documents"]

_SEED = 42
_LABEL_TOKENS = 20  # generated
_RULE = (
    "Use the provided mapping from the text to label to assign a label to the text. "
    'Only output "label: {label}" and nothing else. '
)


def documents(
    *,
    source: Mapping[str, Any],
    label: str,
    tokenizer: str,
    text: str = "text",
    test: str = "test",
    max_seq_lengths: Sequence[int] = (4096,),
    questions: int = 500,
    **_: Any,
) -> dict[str, Dataset]:
    """Texts to be classified, each behind classified ones. Labels are numbers, drawn anew for every question.

    Args:
        source: arguments of `datasets.load_dataset`.
        label, text: names of columns.
        test: the split of the questions; "" for a tenth of "train".
        tokenizer: name or folder.
        max_seq_lengths: tokens of prompt and generated answer together, at most.
        questions: how many per length, at most.
    """
    data = load_dataset(**source)
    parts = data if test else data["train"].train_test_split(test_size=0.1, seed=_SEED)
    by_label: dict[Any, list[str]] = {}
    for row in parts["train"]:
        by_label.setdefault(row[label], []).append(row[text])
    asked = parts[test or "test"].shuffle(seed=_SEED)
    count = token_counter(tokenizer)
    rows = [
        _question(row[text], row[label], by_label, length, count)
        for length in max_seq_lengths
        for row in asked.select(range(min(questions, len(asked))))
    ]
    return {"test": Dataset.from_list(rows)}


def _question(asked: str, label: Any, by_label: Mapping[Any, list[str]], length: int, count: Any) -> dict[str, Any]:
    draws = random.Random(f"{_SEED} {asked}")
    numbers = dict(zip(by_label, draws.sample(range(len(by_label)), len(by_label))))

    def prompt(examples: Sequence[tuple[Any, str]]) -> str:
        shown = "".join(f"{text}\nlabel: {numbers[label]}\n\n" for label, text in examples)
        return f"{_RULE}\n\n{shown}{asked}\nlabel:"

    examples = fill(prompt, _rounds(by_label, draws), count, length - _LABEL_TOKENS)
    answer = str(numbers.get(label))  # a label without an example has no number
    return {"input": prompt(examples), "output": answer, "is_label": True, "max_length": length, "shots": len(examples)}


def _rounds(by_label: Mapping[Any, list[str]], draws: random.Random) -> Iterator[tuple[Any, str]]:
    """Endless rounds of one text of each label, in random order. A text comes again only after all others of its label."""
    left: dict[Any, list[str]] = {label: [] for label in by_label}
    while True:
        for label in draws.sample(list(by_label), len(by_label)):
            if not left[label]:
                left[label] = draws.sample(by_label[label], len(by_label[label]))
            yield label, left[label].pop()
