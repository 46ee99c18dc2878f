"""Trainings that a claim watches are those of recall, and spikes are measured by the steps before them."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from fastweights_studies.claims import Conditions
from fastweights_studies.claims.watched import in_processes, largest_spike, train_watched
from fastweights_studies.places import ROOT

from fastweights.training import RecallRun, train_run
from fastweights.training.recall.batches import training_batches
from fastweights.training.recall.train import Training

RUN = RecallRun(
    mixer="deltanet", pairs=4, learning_rate=1e-2, layers=1, width=16, steps=4, batch_size=2, test_examples=8
)


def test_a_watched_training_is_that_of_recall(tmp_path):
    training, norms = train_watched(RUN, lambda model: None)
    plain = train_run(RUN, tmp_path / "checkpoint")
    assert training.result().losses == plain.losses and training.result().accuracy == plain.accuracy
    assert len(norms) == 4 and min(norms) > 0


def test_what_is_changed_is_trained():
    def add(model):
        model.extra = torch.nn.Parameter(torch.ones(3))

    training, _ = train_watched(RUN, add)
    assert (training.model.extra == 1).all()  # no gradient, and no weight decay
    assert any(p is training.model.extra for group in training.take.optimizer.param_groups for p in group["params"])


def test_a_lost_training_ends(monkeypatch):
    def spoil(model):
        model.lm_head.weight.data.fill_(float("nan"))

    training, norms = train_watched(RUN, spoil)
    assert training.history.diverged and len(norms) == 1


def test_spikes_are_relative_to_the_steps_before():
    assert largest_spike([1.0] * 20) == 1.0
    assert largest_spike([2.0] * 20 + [6.0] + [60.0] * 20) == 30.0
    assert largest_spike([100.0] + [1.0] * 20) == 1.0


def test_jobs_keep_their_order():
    assert in_processes(abs, [-3, 2, -1], Conditions(seeds=(0,), workers=2)) == [3, 2, 1]


def test_the_norm_is_that_before_the_gradients_are_scaled_down():
    training = Training(dataclasses.replace(RUN, max_gradient_norm=0.01))
    training.step(next(training_batches(RUN, 0)))
    scaled = torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters() if p.grad is not None])
    assert scaled.item() == pytest.approx(0.01, rel=1e-3) and training.take.gradient_norm.item() > 0.1


SCRIPT = """
from fastweights.layers import register_mixer
from fastweights.layers.delta_net import DeltaNet

@register_mixer("mine", summary="mine", equation="S", source="here", state="H K V")
class Mine(DeltaNet):
    pass

from pathlib import Path
from fastweights_studies.claims import Conditions
from fastweights_studies.claims.watched import in_processes
from fastweights.layers import MixerChoice
conditions = Conditions(seeds=(0,), device="cpu", folder=Path("claims"), measurements=Path("."), workers=2)
print(in_processes(MixerChoice, ["mine", "gdn"], conditions))
print("ends")
"""


@pytest.mark.slow
def test_processes_of_a_script_without_the_line(tmp_path):
    """One that has no `if __name__ == "__main__":`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ends") == 1
