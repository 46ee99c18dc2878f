"""Recall trainings on a GPU: steps replayed as CUDA graphs, and several workers per GPU, over all GPUs of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastweights.training import RecallRun, Stage, run_recall, train_run
from fastweights.training.progress import Silent
from fastweights.training.recall.batches import training_batches
from fastweights.training.recall.train import Training
from tests.training.small import numbers, small_experiment, small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


CURRICULUM = {"curriculum": (Stage(pairs=2, steps=8), Stage(pairs=4, steps=8, length=24)), "pairs": 4, "length": 24}
TRAININGS = {
    **{mixer: {"mixer": mixer} for mixer in ("softmax", "gdn", "pla", "palimpsa-d", "gka", "lattice", "vla", "rls")},
    "curriculum": {"mixer": "pgdn", **CURRICULUM},
    "regression": {"mixer": "deltanet", "task": "regression", "pairs": 4},
}


def gpu_run(**settings: object) -> RecallRun:
    return small_run(**{"width": 32, "steps": 16, "device": "cuda", **settings})


@pytest.fixture
def deterministic():
    """As in the workers of `run_recall`."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", TRAININGS)
def test_captured_steps_are_the_same_steps(name: str, deterministic: None) -> None:
    run = gpu_run(**TRAININGS[name])

    def trained(uses_graphs: bool) -> Training:
        training = Training(run, uses_graphs)
        for batch in training_batches(run, 0):
            training.step(batch)
        return training

    graphs, launches = trained(True), trained(False)
    assert len(graphs.take.graphs) == len(run.stages()) and all(graphs.take.graphs.values())
    assert not launches.take.graphs
    assert graphs.history.losses == launches.history.losses and len(graphs.history.losses) == 16
    for x, y in zip(graphs.model.parameters(), launches.model.parameters(), strict=True):
        assert torch.equal(x, y)


def test_a_captured_training_continues(tmp_path: Path, deterministic: None) -> None:
    run, steps = gpu_run(mixer="gdn"), iter(range(16))
    whole = train_run(run, tmp_path / "whole")
    assert train_run(run, tmp_path / "parts", should_stop=lambda: next(steps) == 9) is None
    assert numbers(train_run(run, tmp_path / "parts")) == numbers(whole)


def test_a_model_that_waits_is_not_captured() -> None:
    run = gpu_run(mixer="linear")
    training, read = Training(run), []
    training.model.lm_head.register_forward_hook(lambda *_: read.append(training.take.rate.item()))
    for batch in training_batches(run, 0):
        training.step(batch)
    assert list(training.take.graphs.values()) == [None]
    assert training.history.step == 16 and not training.history.diverged


def losses(folder: Path, workers: int, device: str) -> list[list[float]]:
    experiment = small_experiment(mixers=("gdn", "palimpsa-d"), seeds=(0, 1), width=32, steps=40, device=device)
    return [result.losses for result in run_recall(experiment, folder, workers=workers)]


def test_workers_that_share_a_gpu_give_the_numbers_of_one(tmp_path: Path) -> None:
    assert losses(tmp_path / "four", 4, "cuda:0") == losses(tmp_path / "one", 1, "cuda:0")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_workers_are_spread_over_the_gpus(tmp_path: Path) -> None:
    class Watcher(Silent):
        used: frozenset[int] = frozenset()

        def step(self, worker, run, step, loss, speed):
            free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
            self.used |= {gpu for gpu, before in enumerate(self.before) if before - free[gpu] > 2**27}

    watcher = Watcher()
    watcher.before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    experiment = small_experiment(mixers=("gdn",), seeds=(0, 1, 2, 3), width=32, steps=400, device="cuda")
    results = run_recall(experiment, tmp_path, workers=4, reporter=watcher)
    assert len(results) == 4 and len(watcher.used) >= 2
