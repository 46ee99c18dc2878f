"""`fastweights evaluate` from outside: table, file, plot, and one line for what is wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from fastweights.cli import main
from fastweights.evaluation.evaluate import EvaluationSettings
from tests.evaluation.small import TEXT, save

QUICK = "--lengths 300,260 --pairs 2 --symbols 16 --recall-examples 2 --needle-examples 1 --depths 0.5"
EXAMPLES = Path(__file__).parents[2] / "examples" / "lm_eval"


@pytest.fixture
def run(tmp_path):
    """The folder of a training run with a small model in it, and a file with text."""
    save(tmp_path / "run" / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "run"


def command(run, options):
    return ["evaluate", str(run), *QUICK.split(), "--text", str(run.parent / "text.txt"), *options.split()]


def test_tables_file_and_plot(run, capsys):
    assert main(command(run, "--on perplexity,mqar,s-niah-2")) == 0
    printed = capsys.readouterr().out
    for word in ("Perplexity by context length", "300", "mqar", "s-niah-2", "evaluation.json", "perplexity.png"):
        assert word in printed
    saved = json.loads((run / "evaluation.json").read_text())
    assert {name: len(rows) for name, rows in saved["results"].items()} == {"perplexity": 2, "mqar": 2, "s-niah-2": 2}
    assert saved["settings"]["lengths"] == [300, 260] and saved["text"] == str(run.parent / "text.txt")
    assert f"{saved['results']['perplexity'][0]['perplexity']:,.2f}" in printed
    plot = (run / "evaluation-perplexity.png").read_bytes()
    assert plot.startswith(b"\x89PNG\r\n\x1a\n") and len(plot) > 10_000


def test_every_setting_has_an_option(run):
    chosen = {
        "measures": ["copy"],
        "lengths": [30, 20],
        "texts": 3,
        "stretch": 5,
        "batch_size": 2,
        "pairs": 2,
        "symbols": 16,
        "recall_examples": 1,
        "needle_examples": 2,
        "ruler_examples": 3,
        "depths": [0.25],
        "seed": 7,
        "block": 9,
    }
    defaults = dataclasses.asdict(EvaluationSettings())
    assert chosen.keys() == defaults.keys() and not any(chosen[name] == defaults[name] for name in chosen)
    options = []
    for name, value in chosen.items():
        flag = "--on" if name == "measures" else f"--{name.replace('_', '-')}"
        options += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    assert main(["evaluate", str(run), *options]) == 0
    assert json.loads((run / "evaluation.json").read_text())["settings"] == chosen


def test_output_goes_where_it_is_wanted_and_replaces_what_is_there(run, capsys):
    output = run.parent / "out" / "small.json"
    for options in ("--on copy", "--on mqar-shuffled"):
        assert main([*command(run, options), "--output", str(output)]) == 0
    assert list(json.loads(output.read_text())["results"]) == ["mqar-shuffled"]
    assert not (run / "evaluation.json").exists() and not list(output.parent.glob("*.png"))


def test_the_harness_alone_with_tasks_of_a_folder(run, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'fastweights[eval]'")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    assert main(command(run, f"--lm-eval facts_choice,facts_answer --limit 2 --include-path {EXAMPLES}")) == 0
    printed = capsys.readouterr().out
    assert "facts_choice" in printed and "exact_match" in printed and "Perplexity" not in printed
    saved = json.loads((run / "evaluation.json").read_text())
    assert list(saved["results"]) == ["lm-eval"] and saved["versions"]["lm-eval"]


def test_without_matplotlib_there_is_no_plot_and_all_the_rest(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command(run, "")) == 0
    printed = capsys.readouterr()
    assert "Perplexity" in printed.out and "fastweights[viz]" in printed.err and (run / "evaluation.json").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ("--on perplexty", ["perplexty", "did you mean 'perplexity'"]),
        ("--lengths 100000", ["at least 100000 tokens", "shorter lengths"]),
        ("--lengths 12,x", ["--lengths", "'x'"]),
        ("--on s-niah-1 --lengths 20", ["lengths must be at least", "s-niah-1"]),
        ("--on mqar --symbols 390", ["symbols must be at most"]),
        ("--on mqar --pairs 500", ["lengths must be at least 2000"]),
        ("--on mqar --symbols 1", ["symbols must be at least 6"]),
        ("--on perplexity,s-niah-1 --lengths 20,300", ["lengths must be at least", "s-niah-1"]),
        ("--on perplexity,perplexity", ["measures must be different"]),
        ("--output .", ["output must be a file"]),
        ("--device meta", ["device", "meta"]),
        ("--limit 2 --num-fewshot 1", ["--limit, --num-fewshot must go with --lm-eval"]),
        ("--ruler-lengths 512,1024", ["--ruler-lengths must go with --lm-eval"]),
        ("--lm-eval facts --ruler-lengths 4k", ["--ruler-lengths takes whole numbers", "'4k'"]),
        ("--on vt --lengths 100", ["lengths must be at least", "vt"]),
        ("--lm-eval facts,", ["--lm-eval", "empty"]),
        ("--max-length 100", ["--max-length must go with --lm-eval or --suite"]),
        ("--lm-eval facts --max-length 0", ["max_length must be a positive whole number"]),
        ("--suite comonsense", ["a suite must be", "did you mean 'commonsense'"]),
        ("--text nowhere.txt", ["nowhere.txt does not exist"]),
        ("--depths 2", ["depths", "2"]),
        ("--dtype int4", ["dtype", "int4"]),
        ("--device abacus", ["device", "abacus"]),
        ("--include-path nowhere --lm-eval facts", ["include_path", "nowhere"]),
        ("--block 0", ["block"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line(run, capsys, options, words):
    if "--lm-eval" in options:
        pytest.importorskip("lm_eval")
    before = sorted(run.rglob("*"))
    assert main(command(run, options)) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastweights: error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert sorted(run.rglob("*")) == before


def test_a_folder_without_a_model(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_without_the_harness_its_extra_is_named(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "fastweights.evaluation.harness", raising=False)
    assert main(command(run, "--lm-eval facts")) == 2
    assert "pip install 'fastweights[eval]'" in capsys.readouterr().err


def test_a_failure_to_save_is_told(run, capsys):
    output = run.parent / "text.txt" / "out.json"
    assert main([*command(run, ""), "--output", str(output)]) == 2
    assert capsys.readouterr().err.startswith("fastweights: error: output must be")


def test_what_was_measured_before_an_error_is_shown(run, capsys):
    assert main(command(run, "--on mqar,perplexity --lengths 260,21000")) == 2
    printed = capsys.readouterr()
    assert "mqar" in printed.out and "Results:" in printed.out and "at least 21000 tokens" in printed.err


def test_a_full_device_is_one_line(run, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More")

    monkeypatch.setattr("fastweights.models.loading.load_language_model", full)
    assert main(command(run, "")) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_text_of_ones_own_it_is_said_what_was_measured(run, capsys):
    words = ["evaluate", str(run), *QUICK.split(), "--on", "perplexity"]
    assert main(words) == 0
    assert "it may be this" in " ".join(capsys.readouterr().out.split())
    corpus = {"paths": [str(run.parent / "text.txt")], "held_out_fraction": 0.5}
    (run / "run.json").write_text(json.dumps({"corpus": corpus, "model": {}}))
    assert main(words) == 0
    printed = capsys.readouterr()
    assert f"Text: held-out text of the training in {run}\n" in printed.out
    assert f"Reading the text that {run / 'run.json'} names: {run.parent / 'text.txt'}\n" in printed.err
    assert json.loads((run / "evaluation.json").read_text())["text"] == f"held-out text of the training in {run}"


def test_what_a_training_names_is_said_before_it_is_read(run, capsys):
    damaged = run.parent / "of a stranger.jsonl"
    damaged.write_text("no JSON\n")
    (run / "run.json").write_text(json.dumps({"corpus": {"paths": [str(damaged)]}, "model": {}}))
    assert main(["evaluate", str(run), *QUICK.split()]) == 2
    notice, error = capsys.readouterr().err.splitlines()
    assert notice == f"Reading the text that {run / 'run.json'} names: {damaged}"
    assert error.startswith("fastweights: error: ") and str(damaged) in error
