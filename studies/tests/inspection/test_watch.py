"""Recall runs that look at their memories while they train: the numbers of `inspect_model`."""

import pytest
import torch
from fastweights_studies.inspection import inspect_model

from fastweights.layers import MixerChoice
from fastweights.models import FastWeightsForCausalLM
from fastweights.training import RecallRun, train_run

SMALL = {"task": "mqar-shuffled", "vocab_size": 16, "width": 8, "heads": 2, "layers": 1, "steps": 12, "batch_size": 4,
         "test_examples": 8, "evaluations": 2, "pairs": 2, "learning_rate": 0.01}  # fmt: skip
WATCHED = {"mixer": MixerChoice("palimpsa-d", {"head_dim": 4}), "watch_every": 4}


def small_run(**changes):
    return RecallRun(**{**SMALL, **changes})


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
    assert cut is None and train_run(run, tmp_path / "cut").watched == whole.watched


def test_what_a_layer_does_not_have_is_left_out(tmp_path):
    found = train_run(small_run(mixer="deltanet", watch_every=6), tmp_path / "x").watched
    assert set(found) == {"step"}
    found = train_run(small_run(mixer="gdn", watch_every=6), tmp_path / "y").watched
    assert set(found) == {"step", "window"}
