"""Trainings outside of the bound: their steps are within it or beyond it, gains start alike, and the rule sees what is harmed."""

import math

import pytest
import torch
from fastweights_studies.experiments import Conditions, Measurement, find_claim
from fastweights_studies.experiments.own import o3b_training_outside_the_bound as outside

from fastweights.layers import DeltaNet
from fastweights.training import RecallRun
from fastweights.training.recall.objectives import objective_of

INSIDE = [inside for inside, _ in outside.FAMILIES.values()]
OUTSIDE = [beyond for _, beyond in outside.FAMILIES.values()]


def test_gains_of_every_range_start_alike():
    x = torch.zeros(1, 1, 4)
    for largest in (2.0, 4.0, 8.0):
        gain = outside.ShiftedGain(4, 2, largest, first=1.0)
        torch.testing.assert_close(gain(x), torch.ones(1, 1, 2))
        torch.testing.assert_close(gain.of(torch.tensor(100.0)), torch.tensor(largest))


@pytest.mark.parametrize("name", outside.SETTINGS)
def test_steps_are_contractions_inside_and_can_be_more_outside(name):
    """With gains at their largest and long keys."""
    setting = outside.SETTINGS[name]
    small = {**outside.TRAINED, "length": 48}
    run = RecallRun(mixer=setting.mixer, learning_rate=1e-2, **small)
    torch.manual_seed(0)
    model = objective_of(run.make_task()).build(run.model_config())
    outside.change_gains(model, setting.gains)
    for layer in model.modules():
        if isinstance(layer, DeltaNet):
            layer.gain.b_proj.weight.data.mul_(1e3)
            for p in layer.qkv.parameters():
                if not layer.options.normalize_qk:
                    p.data.mul_(10)
    steps = outside.read_steps(model, run)
    assert (steps.largest <= 2 + 1e-6) == (name in INSIDE) and (steps.beyond > 0) == (name in OUTSIDE)
    if setting.gains is not None:  # the range is reached
        assert steps.largest > 0.6 * int(name.rsplit(" ", 1)[1])
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
    assert found.values["keys of any length: share of diverged trainings"] == [0, 1]
    assert math.isnan(found.values["keys of any length: largest step after training"][1])
    assert found.values["longhorn, up to 1: share of troubled trainings"] == [0, 0]
    assert "free keys" in claim.decide(found).reason


def measured(**changed):
    """Settings that are alike, but for numbers that are changed of some."""
    values = {}
    for name in outside.SETTINGS:
        for number, value in {
            "accuracy": 0.8,
            "share of troubled trainings": 0.0,
            "largest spike of gradients": 5.0,
        }.items():
            values[f"{name}: {number}"] = [value + shift for shift in (0.0, 0.01 * (number == "accuracy"))]
    return Measurement({**values, **changed})


def test_what_decides():
    decide = find_claim("own-3b").decide
    assert decide(measured()).status == "does not hold"
    lost = {f"{name}: share of troubled trainings": [0.5, 0.5] for name in OUTSIDE}
    worse = {f"{name}: accuracy": [0.7, 0.71] for name in OUTSIDE}
    for harm in (lost, worse):
        assert decide(measured(**harm)).status == "holds"
        first = dict([next(iter(harm.items()))])
        assert decide(measured(**first)).status == "holds weakly"
        assert decide(measured(**first)).reason.count("(harmed)") == 1
    noisy = {f"{name}: accuracy": [0.5, 0.9] for name in OUTSIDE}
    assert decide(measured(**noisy)).status == "does not hold"
    inside = {f"{INSIDE[0]}: share of troubled trainings": [0.0, 0.5]}
    assert decide(measured(**lost, **inside)).status == "does not hold"
