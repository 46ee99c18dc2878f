"""Results come back from their files as they were, and damaged files are refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest

from fastweights.results import ResultsError, load_results, summarize
from fastweights.results.experiment import save_results
from fastweights.results.recall import load_result, save_result
from fastweights.training import RecallExperiment

from .made_up import made_up


def test_one_result_comes_back(tmp_path):
    result, path = made_up(accuracy=1 / 3, losses=[0.1 + 0.2, 1e-300]), tmp_path / "run.json"
    save_result(path, result)
    assert load_result(path, run=result.run) == result
    with pytest.raises(ResultsError, match="another run"):
        load_result(path, run={**result.run, "seed": 1})


def test_results_come_back_with_summary_and_configuration(tmp_path):
    results, path = [made_up("gdn"), made_up("linear", accuracy=None)], tmp_path / "results.json"
    save_results(path, experiment={"mixers": ["gdn", "linear"]}, results=results)
    assert load_results(path) == results
    record = json.loads(path.read_text())
    assert record["experiment"] == {"mixers": ["gdn", "linear"]}
    assert [row["accuracy"] for row in record["summary"]] == [0.5, None]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 99, "runs": []}', b'{"format": 1}'])
def test_damaged_results_are_refused_by_name(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=r"results\.json.*delete that file"):
        load_results(path)


def test_results_of_other_fields_are_refused(tmp_path):
    path = tmp_path / "results.json"
    record = dataclasses.asdict(made_up())
    path.write_text(json.dumps({"format": 1, "runs": [{**record, "surplus": 1}]}))
    with pytest.raises(ResultsError, match="surplus"):
        load_results(path)


def test_numbers_that_are_not_json_are_never_written(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(ValueError, match="JSON compliant"):
        save_result(path, made_up(accuracy=float("nan")))
    assert not list(tmp_path.iterdir())


def test_results_of_before_there_were_labels_are_read():
    """before_labels.json was written when a mixer was a name and nothing else."""
    results = load_results(Path(__file__).with_name("before_labels.json"))
    assert {result.mixer for result in results} == {result.run["mixer"] for result in results} >= {"linear", "gdn"}


def test_settings_of_before_describe_the_same_experiment():
    """before_labels.json was written with one layer, 4 heads, 800 steps and smaller first weights, the defaults then."""
    file = Path(__file__).with_name("before_labels.json")
    old = RecallExperiment(
        mixers=("linear", "gla", "deltanet", "gdn", "pgdn", "rls"), pairs=(4, 8, 16), learning_rates=(0.005,),
        layers=1, heads=4, steps=800, initializer_range=0.02,
    )  # fmt: skip
    assert json.loads(json.dumps(old.record())) == json.loads(file.read_text())["experiment"]


def test_results_are_named_and_summarized_by_label():
    mixers = ("gdn", {"name": "gdn", "options": {"conv_size": 2}, "label": "short"})
    results = [made_up(mixer, accuracy=accuracy) for mixer in mixers for accuracy in (0.2, 0.4)]
    assert [result.mixer for result in results] == ["gdn", "gdn", "short", "short"]
    assert [row.mixer for row in summarize(results)] == ["gdn", "short"]
