"""All measures of a text model in one call, each the number that its own function gives; the report they are saved to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fastweights.data import make_task
from fastweights.data.text import TextCorpus
from fastweights.evaluation import (
    MEASURES,
    EvaluationSettings,
    TaskInWords,
    evaluate,
    needle_recall,
    perplexity_by_length,
    recall_accuracy,
    ruler_recall,
    word_tokens,
)
from fastweights.evaluation.reading import within_memory
from fastweights.evaluation.report import EvaluationReport
from fastweights.evaluation.text import HeldOutText
from fastweights.training.language import LanguageRun
from fastweights.training.language.folder import LanguageFolder

from .small import TEXT, model, tokenizer

# The list of cwe takes thousands of this tokenizer's tokens.
FITTING = tuple(measure for measure in MEASURES if measure != "cwe")
SETTINGS = EvaluationSettings(
    measures=FITTING,
    lengths=(430, 400),
    pairs=2,
    symbols=16,
    recall_examples=3,
    needle_examples=1,
    ruler_examples=1,
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
    assert tuple(results) == FITTING
    for measure, rows in results.items():
        lengths = [400, 400, 430, 430] if measure.startswith("s-niah") else [400, 430]
        assert [row.length for row in rows] == lengths


def test_the_numbers_are_those_of_the_functions(results):
    lm = model()
    assert results["perplexity"] == perplexity_by_length(lm, DOCUMENTS, [400, 430], texts=2)
    assert results["s-niah-3"][3] == needle_recall(lm, WORDS, "s-niah-3", length=430, depth=1.0, examples=1, text=TEXT)
    assert results["vt"][1] == ruler_recall(lm, WORDS, "vt", length=430, examples=1, text=TEXT)
    task = TaskInWords(make_task("copy", pairs=2, length=430, vocab_size=16), word_tokens(WORDS, 16), [])
    assert results["copy"][1].accuracy == recall_accuracy(lm, task, seed=0, examples=3)
    assert (results["copy"][1].chance, results["copy"][1].task) == (0.5, "copy")


def test_prompts_are_read_batch_size_at_a_time(monkeypatch):
    lm, rows = model(), []
    generate = lm.generate
    monkeypatch.setattr(lm, "generate", lambda ids, **options: rows.append(len(ids)) or generate(ids, **options))
    settings = replace(
        SETTINGS,
        measures=("s-niah-1", "vt"),
        lengths=(400,),
        depths=(0.5,),
        needle_examples=2,
        ruler_examples=2,
        batch_size=2,
    )
    assert [measure for measure, _ in evaluate(lm, WORDS, settings, text=TEXT)] == ["s-niah-1", "vt"]
    assert rows == [2, 2]


def test_what_does_not_fit_is_told_before_anything_is_measured():
    for change, message in (
        ({"pairs": 120}, "^lengths must be at least 480 for 120 pairs of task 'mqar'.*; raise lengths or lower pairs"),
        ({"symbols": 399}, "symbols must be at most"),
        ({"symbols": 1}, "^symbols must be at least 6 for 2 pairs of task 'mqar', got 1; raise symbols or lower pairs"),
        ({"lengths": (390, 430), "measures": ("perplexity", "fwe")}, "lengths must be at least .* for 'fwe'"),
        ({"measures": ("cwe",)}, "lengths must be at least .* tokens for 'cwe' at its smallest, got 400"),
        ({"lengths": (30, 330), "measures": ("perplexity", "s-niah-1")}, "lengths must be at least .* for 's-niah-1'"),
    ):
        settings = EvaluationSettings(**{**vars(SETTINGS), **change})
        with pytest.raises(ValueError, match=message):
            evaluate(None, WORDS, settings, documents=DOCUMENTS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"measures": ["perplexty"]}, "a measure must be one of 'perplexity', .* .did you mean 'perplexity'"),
        ({"measures": ["copy", "copy"]}, "measures must be different from each other, got copy, copy"),
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


@pytest.mark.parametrize(
    "options, message",
    [
        ({"measures": "copy"}, "measures must be a list of names of measures, got 'copy'"),
        ({"lengths": 512}, "lengths must be a list of whole numbers, got 512"),
        ({"lengths": [512.0]}, "lengths must be a positive whole number, got 512.0"),
        ({"depths": 0.5}, "depths must be a list of numbers, got 0.5"),
        ({"depths": ["0.5"]}, "depths must be a number, got '0.5'"),
        ({"pairs": "8"}, "pairs must be a positive whole number, got '8'"),
        ({"seed": 1.0}, "seed must be a whole number of at least 0, got 1.0"),
    ],
)
def test_settings_of_a_wrong_kind_are_refused(options, message):
    with pytest.raises(TypeError, match=f"^{message}"):
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
    assert row["perplexity"] == results["perplexity"][1].perplexity and row["length"] == 430
    assert saved["model"]["parameters"] == model().num_parameters()
    assert saved["settings"]["lengths"] == [430, 400] and saved["text"] == "some text"
    assert saved["versions"]["torch"] and saved["machine"]["cores"] >= 1


def test_text_is_that_of_the_files_or_what_training_holds_out(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    text = HeldOutText([tmp_path])
    assert [WORDS.decode(ids) for ids in text.documents(WORDS)] == ["text of a", "text of b"]
    assert text.haystack() == "text of a\n\ntext of b" and text.name == str(tmp_path)
    default = HeldOutText([])
    assert default.haystack() is None and "held-out" in default.name and "it may be this" in default.name
    first, second = (next(default.documents(WORDS)) for _ in range(2))
    assert first == second and len(first) > 10


def trained(folder, corpus, **model):
    """A folder with the run.json of a training."""
    folder.mkdir(exist_ok=True)
    described = LanguageFolder(folder).describe(LanguageRun(corpus=corpus, model=model))
    (folder / "run.json").write_text(json.dumps(described))
    return folder


def texts(held_out):
    return [WORDS.decode(ids) for ids in held_out.documents(WORDS)]


def test_a_training_is_measured_on_the_text_that_it_held_out(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    own = TextCorpus(paths=(str(tmp_path),), held_out_fraction=0.5)
    run = trained(tmp_path / "run", own)
    wanted = [document.text for document in own.documents() if document.held_out]
    assert 0 < len(wanted) < 12
    for model_folder in (run, run / "model", run / "checkpoints" / "checkpoint-5"):
        held_out = HeldOutText([], model_folder)
        assert texts(held_out) == wanted
        assert held_out.haystack() is None and held_out.name == f"held-out text of the training in {run}"
    assert texts(HeldOutText([tmp_path / "3.txt"], run)) == ["text 3"]
    named = TextCorpus(paths=(str(tmp_path / "1.txt"),), held_out=(str(tmp_path / "2.txt"),))
    held_out = HeldOutText((), trained(run, named, path="elsewhere"))
    assert texts(held_out) == ["text 2"] and "may have been trained on it" in held_out.name


def test_a_folder_that_tells_nothing_of_a_training_or_what_cannot_be_used(tmp_path):
    assert HeldOutText([], tmp_path).name == HeldOutText([], tmp_path / "model").name == HeldOutText([]).name
    run = trained(tmp_path / "run", TextCorpus(paths=("nowhere",)))
    with pytest.raises(ValueError, match="held-out text of the training in .* nowhere does not exist.* --text"):
        HeldOutText([], run / "model").documents(WORDS)
    for content in ("{", "[]", "{}", '{"corpus": {"paths": 3}, "model": {}}', '{"corpus": {"x": 3}, "model": {}}'):
        (run / "run.json").write_text(content)
        with pytest.raises(ValueError, match="run.json must say what text .*; pass --text"):
            HeldOutText([], run)


@pytest.mark.parametrize("measure", FITTING)
def test_a_model_with_damaged_weights_has_no_result(measure):
    lm = model()
    with torch.no_grad():
        lm.lm_head.weight[3] = float("nan")
    settings = EvaluationSettings(**{**vars(SETTINGS), "measures": (measure,), "lengths": (400,)})
    with pytest.raises(ValueError, match="model must give finite"):
        next(evaluate(lm, WORDS, settings, documents=DOCUMENTS))


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "report.json", "cannot: ")):
        with pytest.raises(ValueError, match=f"output must be a file.*{message}"):
            EvaluationReport(path, model=model(), name="small", settings=SETTINGS, text="")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_device_is_told_with_what_helps():
    wanted = r"memory is full; a smaller --block needs less\. CUDA out .* 2\.00 GiB$"
    with pytest.raises(OSError, match=wanted), within_memory("a smaller --block"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total. See also")
