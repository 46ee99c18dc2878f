"""Recall trainings at the same time: several workers per GPU, over all GPUs of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastweights.training import run_recall
from fastweights.training.progress import Silent
from tests.training.small import small_experiment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


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
