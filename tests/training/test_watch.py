"""Runs that look at their memories while they train, and runs that keep their models."""

import pytest
import torch
from fastweights_studies.inspection import inspect_model

from fastweights.evaluation import recall_accuracy
from fastweights.layers import MixerChoice
from fastweights.models import FastWeightsForCausalLM
from fastweights.training import train_run
from fastweights.training.folder import ExperimentFolder
from tests.training.small import SMALL, numbers, small_experiment, small_run

WATCHED = {"mixer": MixerChoice("palimpsa-d", {"head_dim": 4}), "watch_every": 4}


def test_windows_and_importances_are_those_of_the_model(tmp_path):
    run = small_run(**WATCHED, save_models=True)
    found = train_run(run, tmp_path / "checkpoint", model_folder=tmp_path / "model").watched
    assert found["step"] == [4.0, 8.0, 12.0] and {len(values) for values in found.values()} == {3}
    model = FastWeightsForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = run.make_task().batch("test", seed=0, index=0, batch_size=4).input_ids
    for name, measure in (("window", "window"), ("metaplasticity ratio", "metaplasticity")):
        shown = [inspect_model(model, row, measures=[measure], every=len(row)).panels[measure][0][0] for row in ids]
        values = torch.stack([panel.y[-1].mean() for panel in shown])
        assert found[name][-1] == pytest.approx(values.mean().item(), rel=1e-6)
    assert found["window"][0] != found["window"][-1]


def test_looking_changes_nothing_and_continues(tmp_path):
    plain = train_run(small_run(mixer=WATCHED["mixer"]), tmp_path / "plain")
    run = small_run(**WATCHED)
    whole = train_run(run, tmp_path / "whole")
    assert plain.watched == {} and plain.losses == whole.losses and plain.accuracies == whole.accuracies
    steps = iter(range(100))
    cut = train_run(run, tmp_path / "cut", should_stop=lambda: next(steps) == 6)
    assert cut is None and numbers(train_run(run, tmp_path / "cut")) == numbers(whole)


def test_what_a_layer_does_not_have_is_left_out(tmp_path):
    found = train_run(small_run(mixer="deltanet", watch_every=6), tmp_path / "x").watched
    assert set(found) == {"step"}
    found = train_run(small_run(mixer="gdn", watch_every=6), tmp_path / "y").watched
    assert set(found) == {"step", "window"}


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
