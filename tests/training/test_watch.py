"""Runs that look at their memories while they train, and runs that keep their models."""

from types import SimpleNamespace

import pytest

from fastweights.data import RecallTask
from fastweights.evaluation import recall_accuracy
from fastweights.models import FastWeightsForCausalLM
from fastweights.training import run_recall, train_run
from fastweights.training.recall import watching
from fastweights.training.recall.folder import ExperimentFolder
from tests.training.small import SMALL, numbers, small_experiment, small_run


@pytest.fixture
def watches(monkeypatch):
    """The functions that are installed to look at models, as their entry points load them."""
    found = []

    def entry_points(group):
        assert group == "fastweights.watches"
        return [SimpleNamespace(load=lambda watch=watch: watch) for watch in found]

    monkeypatch.setattr(watching, "entry_points", entry_points)
    watching.find_watches.cache_clear()
    yield found
    watching.find_watches.cache_clear()


def largest_weight(model, task, *, seed, device):
    assert isinstance(task, RecallTask)
    return {"largest weight": max(weight.abs().max().item() for weight in model.parameters())}


def sizes(model, task, *, seed, device):
    return {"pairs": float(task.pairs), "seed": float(seed)}


def test_every_watch_that_is_installed_looks_and_changes_nothing(tmp_path, watches):
    watches += [largest_weight, sizes]
    plain, run = train_run(small_run(), tmp_path / "plain"), small_run(watch_every=4, save_models=True)
    whole = train_run(run, tmp_path / "whole", model_folder=tmp_path / "model")
    assert plain.watched == {} and plain.losses == whole.losses and plain.accuracies == whole.accuracies
    assert whole.watched["step"] == [4.0, 8.0, 12.0] and whole.watched["pairs"] == [2.0] * 3
    model = FastWeightsForCausalLM.from_pretrained(tmp_path / "model")
    (last,) = largest_weight(model, run.make_task(), seed=0, device="cpu").values()
    assert whole.watched["largest weight"][-1] == last != whole.watched["largest weight"][0]
    steps = iter(range(100))
    cut = train_run(run, tmp_path / "cut", should_stop=lambda: next(steps) == 6)
    assert cut is None and numbers(train_run(run, tmp_path / "cut")) == numbers(whole)


def test_a_run_that_nothing_can_watch_is_refused_before_it_is_trained(tmp_path, watches):
    message = "watch_every needs a package with an entry point of the group fastweights.watches"
    with pytest.raises(ValueError, match=message):
        train_run(small_run(watch_every=4), tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=message):
        run_recall(small_experiment(watch_every=4), tmp_path / "output")
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_kept_has_the_accuracy_of_its_run(tmp_path):
    run = small_run(save_models=True)
    result = train_run(run, tmp_path / "checkpoint", model_folder=tmp_path / "model")
    model = FastWeightsForCausalLM.from_pretrained(tmp_path / "model")
    assert recall_accuracy(model, run.make_task(), seed=0, examples=SMALL["test_examples"]) == result.accuracy
    train_run(small_run(), tmp_path / "checkpoint", model_folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_models_of_an_earlier_experiment_are_deleted_with_it(tmp_path):
    folder, experiment = ExperimentFolder(tmp_path / "out"), small_experiment(save_models=True)
    with folder.opened(experiment, overwrite=False):
        model = folder.model(experiment.runs()[0])
        model.mkdir()
        (model / "config.json").write_text("{}")
    with folder.opened(small_experiment(seeds=(1,)), overwrite=True):
        assert not model.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"watch_every": 0}, "watch_every must be a positive whole number"),
        ({"task": "regression", "save_models": True}, "save_models must be left out for task 'regression'"),
        ({"task": "regression", "watch_every": 2}, "watch_every must be left out for task 'regression'"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        small_run(**changes)
    with pytest.raises(TypeError, match="save_models must be"):
        small_run(save_models="yes")
