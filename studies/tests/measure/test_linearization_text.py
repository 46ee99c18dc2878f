"""The documents that ask for recall have the form of the library's tasks, and none of the examples that are measured."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import islice
from pathlib import Path

import pytest
from fastweights_studies.measure import linearization_text
from fastweights_studies.measure.linearization import FULL
from fastweights_studies.measure.linearization_text import (
    CHARACTERS,
    DOCUMENTS,
    LENGTHS,
    NEEDLE,
    RECALL,
    documents,
    with_recall,
    write_recall,
)

from fastweights.evaluation.ruler_text import write_prompt
from tests.training.language.small import small_run

LINE = re.compile(r"^(?:Name the secret number of (.+)\. )?The secret number of (.+) is (\d+)$")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(documents())


@pytest.mark.slow
def test_no_measured_question_stands_in_the_text(texts: list[str]) -> None:
    """Neither a prompt nor a question with its answer, of any length and depth that is measured."""
    whole, asked = "\n".join(texts), FULL.asked
    depths = [{"depth": depth} for depth in asked.depths]
    measured = [(RECALL, asked.ruler_examples, [{}]), (NEEDLE, asked.needle_examples, depths)]
    assert {task for task, *_ in measured} == set(asked.measures)
    drawn = [
        write_prompt(
            task, length=length, seed=asked.seed, index=index, words=("none",), count_tokens=lambda text: len(text) // CHARACTERS,
            **place,
        )
        for task, examples, places in measured
        for length in asked.lengths
        for index in range(examples)
        for place in places
    ]  # fmt: skip
    for prompt, draft in drawn:
        assert prompt not in whole and f"{draft.question} {draft.answer}" not in whole


def test_every_answer_stands_in_the_text_before_its_question() -> None:
    questions = 0
    for text in islice(documents(), 200):
        if text.startswith("Secret numbers"):
            begin, asked = text.rsplit("\n\n", 1)
            lines = [LINE.findall(line)[0] for line in asked.split("\n")]
            assert lines[0][0] == lines[0][1] and not any(named for named, *_ in lines[1:])
            for _, key, value in lines:
                assert begin.count(f"The secret number of {key} is {value}.") == 1
            more, known = [line[1] for line in lines[1:]], begin.count("The secret number of")
            assert len(set(more)) == min(len(more), known)  # all come once before one comes again
            questions += len(lines)
        else:
            key, value = re.findall(r"What is (.+)\? The \1 is (\d+)$", text.replace("What is the ", "What is "))[0]
            assert text.count(f"The {key} is {value}.") == 1
    assert questions > 3.5 * 200


@pytest.mark.slow
def test_the_text_is_as_long_as_it_says(texts: list[str]) -> None:
    """A quarter has one needle. Of each length there are about as many tokens, 8M in all."""
    assert len(texts) == DOCUMENTS
    assert sum(text.startswith("A secret") for text in texts) == pytest.approx(DOCUMENTS / 4, rel=0.05)
    tokens = [len(text) / CHARACTERS for text in texts]
    assert sum(tokens) == pytest.approx(8e6, rel=0.05)
    for length in set(LENGTHS):
        near = [n for n in tokens if 0.8 * length < n < 1.1 * length]
        assert sum(near) == pytest.approx(sum(tokens) / len(set(LENGTHS)), rel=0.15)


def test_the_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "recall.jsonl"
    write_recall(path, 3)
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == list(documents(3))
    monkeypatch.setattr(linearization_text, "documents", None)
    before = path.stat()
    write_recall(path, 3)
    assert path.stat() == before


def test_one_row_of_five_asks_for_recall_and_held_out_text_is_code(tmp_path: Path) -> None:
    (code,) = small_run(tmp_path).corpus.singles
    source = dataclasses.replace(FULL.code, paths=code.paths, held_out_fraction=code.held_out_fraction)
    write_recall(tmp_path / "recall.jsonl", 100)
    corpus = with_recall(tmp_path / "recall.jsonl", source)
    assert corpus.weights == [4, 1]
    asks = [document.text.startswith(("Secret", "A secret")) for document in corpus.held_out_documents()]
    assert sum(asks) == 1 and len(asks) > 1
