"""torchtitan and `fastweights train` give one loss curve for the same weights, rows and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastweights.training.language import LanguageRun

from .jobs import started, train
from .own_run import STEPS, own_losses, own_run, settings_of, write_texts

MODEL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "mixer": "gdn"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    folder = tmp_path_factory.mktemp("run")
    write_texts(folder, 24)
    return own_run(folder, MODEL, 32)


@pytest.fixture(scope="module")
def own(run: LanguageRun) -> list[float]:
    return own_losses(run)


@pytest.mark.parametrize(
    ("count", "settings"), [(1, {}), (2, {"parallelism.tensor_parallel_degree": 2})], ids=["alone", "tensor"]
)
def test_the_loss_curve_is_that_of_our_own_trainer(
    count: int, settings: dict[str, Any], run: LanguageRun, own: list[float]
) -> None:
    found = started(count).run(train, {**settings_of(run), **settings}, STEPS, False, MODEL)
    losses = list(found[0]["losses"].values())
    assert len(own) == len(losses) == STEPS and own[-1] < 0.8 * own[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(own), rtol=1e-5, atol=0)
