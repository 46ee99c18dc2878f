"""All measures of a text model in one call, each the number that its own function gives; the report they are saved to."""

from __future__ import annotations

import json

import pytest

from fastweights.data import make_task
from fastweights.evaluation import (
    MEASURES,
    EvaluationSettings,
    TaskInWords,
    evaluate,
    needle_recall,
    perplexity_by_length,
    recall_accuracy,
    word_tokens,
)
from fastweights.evaluation.report import EvaluationReport
from fastweights.evaluation.text import HeldOutText

from .small import TEXT, model, tokenizer

SETTINGS = EvaluationSettings(
    measures=MEASURES,
    lengths=(330, 260),
    pairs=2,
    symbols=16,
    recall_examples=3,
    needle_examples=2,
    depths=(0.0, 1.0),
    texts=2,
)
WORDS = tokenizer()
DOCUMENTS = [WORDS(TEXT[start : start + 2000]).input_ids for start in (0, 2000, 4000)]


@pytest.fixture(scope="module")
def results():
    found: dict = {}
    for measure, rows in evaluate(model(), WORDS, SETTINGS, documents=DOCUMENTS, text=TEXT):
        found.setdefault(measure, []).extend(rows)
    return found


def test_every_measure_at_every_length(results):
    assert tuple(results) == MEASURES
    for measure, rows in results.items():
        lengths = [260, 260, 330, 330] if measure.startswith("s-niah") else [260, 330]
        assert [row.length for row in rows] == lengths


def test_the_numbers_are_those_of_the_functions(results):
    lm = model()
    assert results["perplexity"] == perplexity_by_length(lm, DOCUMENTS, [260, 330], texts=2)
    assert results["s-niah-3"][3] == needle_recall(lm, WORDS, "s-niah-3", length=330, depth=1.0, examples=2, text=TEXT)
    task = TaskInWords(make_task("copy", pairs=2, length=330, vocab_size=16), word_tokens(WORDS, 16), [])
    assert results["copy"][1].accuracy == recall_accuracy(lm, task, seed=0, examples=3)
    assert (results["copy"][1].chance, results["copy"][1].task) == (0.5, "copy")


def test_what_does_not_fit_is_told_before_anything_is_measured():
    for change, message in (
        ({"pairs": 90}, "length must be at least 360 for 90 pairs of task 'mqar'"),
        ({"symbols": 399}, "symbols must be at most"),
    ):
        settings = EvaluationSettings(**{**vars(SETTINGS), **change})
        with pytest.raises(ValueError, match=message):
            next(evaluate(model(), WORDS, settings, documents=DOCUMENTS))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"measures": ["perplexty"]}, "a measure must be one of perplexity, .* did you mean 'perplexity'"),
        ({"lengths": []}, "at least one length"),
        ({"lengths": [0]}, "lengths must be"),
        ({"pairs": 0}, "pairs must be"),
        ({"depths": [0.5, 2]}, "depths must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**options)


def test_the_report_holds_all_that_was_measured_so_far(tmp_path, results):
    path = tmp_path / "new" / "report.json"
    report = EvaluationReport(path, model=model(), name="runs/small", settings=SETTINGS, text="some text")
    assert not path.exists()
    for measure in ("perplexity", "mqar"):
        report.add(measure, results[measure])
        saved = json.loads(path.read_text())
        assert list(saved["results"])[-1] == measure
    row = saved["results"]["perplexity"][1]
    assert row["perplexity"] == results["perplexity"][1].perplexity and row["length"] == 330
    assert saved["model"]["parameters"] == model().num_parameters()
    assert saved["settings"]["lengths"] == [330, 260] and saved["text"] == "some text"
    assert saved["versions"]["torch"] and saved["machine"]["cores"] >= 1


def test_text_is_that_of_the_files_or_what_training_holds_out(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    text = HeldOutText([tmp_path])
    assert [WORDS.decode(ids) for ids in text.documents(WORDS)] == ["text of a", "text of b"]
    assert text.haystack() == "text of a\n\ntext of b" and text.name == str(tmp_path)
    default = HeldOutText([])
    assert default.haystack() is None and "held-out" in default.name
    first, second = (next(default.documents(WORDS)) for _ in range(2))
    assert first == second and len(first) > 10
