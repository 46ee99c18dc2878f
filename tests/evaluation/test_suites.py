"""Suites by name: what they declare, how papers' numbers stand beside a model's, and each suite from the command to the file."""

from __future__ import annotations

import json
import statistics

import pytest

from fastweights.cli import main
from fastweights.evaluation.suites import SUITES, compare_with_papers, evaluate_suites
from fastweights.results import HarnessScore

from .small import model, save, tokenizer


def scores(**values):
    """Scores of the harness, by "task/metric" with _ for /."""
    parts = (name.rsplit("__", 1) for name in values)
    return [
        HarnessScore(task=task, metric=metric, value=value)
        for (task, metric), value in zip(parts, values.values(), strict=True)
    ]


def test_a_column_of_a_paper_is_a_task_of_a_suite():
    known = {task for suite in SUITES.values() for task in suite.tasks}
    rows = compare_with_papers([], list(SUITES), 10**6)
    papers = {row.source for row in rows} - SUITES.keys()
    assert {paper.partition(",")[0] for paper in papers} == {
        "Preconditioned DeltaNet", "Gated KalmaNet", "Palimpsa", "Lattice",
    }  # fmt: skip
    for row in rows:
        assert {column.partition("/")[0] for column in row.values} <= known


@pytest.mark.parametrize("parameters", [1.2e8, 3.5e8, 9e8, 3e9])
def test_printed_averages_are_those_of_the_printed_columns(parameters):
    """A digit that was copied wrong would show. One average of Palimpsa's table 2 is 0.07 off in the paper itself."""
    for row in compare_with_papers([], ["commonsense", "recall", "ruler"], int(parameters)):
        if row.average is not None:
            mean = statistics.fmean(value for name, value in row.values.items() if "perplexity" not in name)
            assert row.average == pytest.approx(mean, abs=0.071 if row.model == "Palimpsa-M-fine-tuned" else 0.0051)


def test_of_a_paper_the_nearest_size_is_shown():
    def sizes(parameters):
        rows = compare_with_papers([], ["commonsense"], parameters)
        return {row.size for row in rows if row.source.startswith("Gated KalmaNet") and row.size}

    assert sizes(3 * 10**8) == {"440M parameters, 8B tokens of DCLM"}
    assert sizes(2 * 10**9) == {"2.8B parameters, 100B tokens of DCLM"}


def test_the_models_row_is_in_percent_with_an_average_of_complete_columns():
    found = scores(
        fda__contains=0.1, swde__contains=0.2, squad_completion__contains=0.3, based_triviaqa__contains=0.4,
        based_drop__contains=0.5,
    )  # fmt: skip
    suite, paper = [row for row in compare_with_papers(found, ["recall"], 340 * 10**6) if row.model == "this model"][:2]
    assert suite.source == "recall" and suite.values["fda/contains"] == 10 and suite.average is None  # NQ is missing
    assert "in-context retrieval" in paper.source and paper.average == pytest.approx(30)
    (perplexity,) = scores(lambada_openai__perplexity=31.5)
    row = compare_with_papers([perplexity], ["commonsense"], 10**8)[0]
    assert row.values["lambada_openai/perplexity"] == 31.5 and row.average is None


def test_a_task_that_is_made_for_a_length_has_a_column_of_each():
    found = scores(**{"niah_single_1__300": 1.0, "niah_single_1__4000": 0.5})
    row = compare_with_papers(found, ["ruler"], 10**8)[0]
    assert row.values == {"niah_single_1/300": 100, "niah_single_1/4000": 50} and row.average == 75


@pytest.mark.parametrize("suites", [["comonsense"], [], ["ruler", ""], "ruler"], ids=str)
def test_bad_suites_are_refused(suites):
    with pytest.raises((ValueError, TypeError), match="suite"):
        evaluate_suites(model(), tokenizer(), suites)


@pytest.mark.parametrize(
    "suite",
    [pytest.param(suite, marks=[] if suite == "commonsense" else pytest.mark.slow) for suite in SUITES],
)
def test_a_suite_from_the_command_to_the_file(suite, tmp_path, monkeypatch, capsys):
    """With the harness's prompts and metrics on local data; every declared number is there."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'fastweights[eval]'")
    needed = {
        "longbench": ("jieba", "fuzzywuzzy", "rouge"),
        "ruler": ("wonderwords",),
        "helmet-recall": ("wonderwords",),
    }
    for name in needed.get(suite, ()):
        pytest.importorskip(name, reason="pip install 'fastweights[eval]'")
    from .suite_tasks import write_suite

    monkeypatch.setattr("nltk.download", lambda *_, **__: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_suite(tmp_path / "tasks", suite)
    folder = save(tmp_path / "model")
    lengths = ["--ruler-lengths", "1500,1600"] if SUITES[suite].has_lengths else []
    command = ["evaluate", str(folder), "--suite", suite, "--include-path", str(tmp_path / "tasks"), *lengths]
    assert main(command) == 0
    printed = capsys.readouterr().out
    results = json.loads((folder / "evaluation.json").read_text())["results"]
    raw = {(score["task"], score["metric"]): score["value"] for score in results["lm-eval"]}
    own = results["suites"][0]
    columns = [
        column.replace("*", length)
        for column in SUITES[suite].columns
        for length in (("1500", "1600") if lengths else ("",))
    ]
    assert list(own["values"]) == columns and own["source"] == suite and own["average"] is not None
    for column, value in own["values"].items():
        known = raw[tuple(column.split("/"))]
        assert value == (known if "perplexity" in column else 100 * known)
    assert f"Suite {suite}" in printed and "No prompt was cut" in printed and columns[0] in printed
    papers = {"commonsense": "Palimpsa-D", "recall": "PGDN", "ruler": "PGDN"}
    assert (papers.get(suite, "As in") in printed) == (suite in papers)
