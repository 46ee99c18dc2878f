"""Trainings outside of the bound: their steps are within it or beyond it, gains start alike, and the rule sees what is harmed."""

import math

import pytest
import torch
from fastweights_studies.claims import Conditions, Measurement, find_claim
from fastweights_studies.own import o3b_training_outside_the_bound as outside

from fastweights.layers import DeltaNet
from fastweights.training import RecallRun
from fastweights.training.recall.objectives import make_objective
from studies.tests.claims.made import change_values, make_numbers
from tests.fast_set import fast_where

INSIDE = [family.inside for family in outside.FAMILIES.values()]
OUTSIDE = [family.outside for family in outside.FAMILIES.values()]


def test_gains_of_every_range_start_alike():
    x = torch.zeros(1, 1, 4)
    for largest in (2.0, 4.0, 8.0):
        gain = outside.ShiftedGain(4, 2, largest, first=1.0)
        torch.testing.assert_close(gain(x), torch.ones(1, 1, 2))
        torch.testing.assert_close(gain.finish(torch.tensor(100.0)), torch.tensor(largest))


@fast_where(lambda given: given["setting"].rule == "pdn")
@pytest.mark.parametrize("setting", outside.SETTINGS, ids=lambda setting: f"{setting.rule}-{setting.reach}")
def test_steps_are_contractions_inside_and_can_be_more_outside(setting):
    """With gains at their largest and long keys."""
    small = {**outside.TRAINED, "length": 48}
    run = RecallRun(mixer=setting.mixer, learning_rate=1e-2, **small)
    torch.manual_seed(0)
    model = make_objective(run.make_task()).build(run.model_config())
    outside.change_gains(model, setting.gains)
    for layer in model.modules():
        if isinstance(layer, DeltaNet):
            layer.gain.b_proj.weight.data.mul_(1e3)
            for p in layer.qkv.parameters():
                if not layer.options.normalize_qk:
                    p.data.mul_(10)
    steps = outside.read_steps(model, run)
    assert (steps.largest <= 2 + 1e-6) == (setting in INSIDE) and (steps.beyond > 0) == (setting in OUTSIDE)
    if setting.gains is not None:  # the range is reached
        assert steps.largest > 0.6 * setting.reach
    assert math.isfinite(steps.log_norm)


@pytest.mark.slow
def test_a_tiny_study(tmp_path, monkeypatch):
    """With a training that is lost."""
    small = {"pairs": 2, "length": 16, "vocab_size": 16, "width": 16, "steps": 2, "batch_size": 2, "test_examples": 4}
    monkeypatch.setattr(outside, "TRAINED", {**outside.TRAINED, **small})
    monkeypatch.setattr(outside, "in_processes", lambda measure, jobs, conditions: [measure(job) for job in jobs])
    train = outside.train_watched

    def lost(run, change):
        training, norms = train(run, change)
        if run.choice.label == "free" and run.seed == 1:
            training.history.diverged = True
        return training, norms

    monkeypatch.setattr(outside, "train_watched", lost)
    claim = find_claim("own-3b")
    found = claim.measure(Conditions(seeds=(0, 1), folder=tmp_path))
    assert found.values("diverged_share", rule="any_keys") == [0, 1]
    assert math.isnan(found.values("largest_step", rule="any_keys", when="after")[1])
    assert found.values("troubled_share", rule="longhorn") == [0, 0]
    assert "free keys" in claim.decide(found).reason


def measured(settings=(), measure="", values=()):
    """Settings that are alike, but for the values of a measure of some."""
    numbers = []
    for setting in outside.SETTINGS:
        for name, alike in {
            "accuracy": [0.8, 0.81],
            "troubled_share": [0.0, 0.0],
            "largest_spike": [5.0, 5.0],
        }.items():
            changed = setting in settings and name == measure
            numbers += make_numbers(name, values if changed else alike, setting.mixer, **setting.column)
    return Measurement(tuple(numbers))


def test_what_decides():
    decide = find_claim("own-3b").decide
    assert decide(measured()).status == "does not hold"
    for harm in (("troubled_share", [0.5, 0.5]), ("accuracy", [0.7, 0.71])):
        assert decide(measured(OUTSIDE, *harm)).status == "holds"
        first = decide(measured(OUTSIDE[:1], *harm))
        assert first.status == "holds weakly" and first.reason.count("(harmed)") == 1
    assert decide(measured(OUTSIDE, "accuracy", [0.5, 0.9])).status == "not resolved"
    lost = measured(OUTSIDE, "troubled_share", [0.5, 0.5])
    inside = change_values(lost, [0.0, 0.5], "troubled_share", **INSIDE[0].column)
    assert decide(inside).status == "does not hold"
