"""In-context regression: a model's squared error by example, beside those of the exact predictors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_device, check_size, check_whole_number, describe_value
from ..data import LinearRegression, VectorTask
from ..kinds import checked
from .reading import MOST_EXAMPLES, TEST_BATCH, evaluating

__all__ = ["RegressionErrors", "regression_errors", "vector_errors"]


@checked
@dataclass(frozen=True, kw_only=True)
class RegressionErrors:
    """Squared errors of predictions of y_1 ... y_n, each from the examples before it; means over sequences and outputs.

    Attributes:
        model: errors of the model.
        ridge: of exact ridge regression on all examples so far with the penalty d noise^2, which without drift is the best
            of all predictors.
        kalman: of the Kalman filter that knows noise and drift: the best predictor with a drift; equal to ridge without.
    """

    model: list[float]
    ridge: list[float]
    kalman: list[float]


def vector_errors(
    model: Any, task: VectorTask, *, seed: int, examples: int, device: str | torch.device = "cpu"
) -> dict[str, list[float]]:
    """Squared errors by example, means over `examples` test sequences and outputs: those of the "model" and of each predictor of
    the task by its name. model: takes inputs [B, T, channels] to outputs [B, T, outputs]."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, such as a VectorModel, got {describe_value(model)}")
    check_whole_number("seed", seed)
    check_size("examples", examples, high=MOST_EXAMPLES)
    check_device(device)
    sums: dict[str, Tensor] = {}
    with evaluating(model):
        for index, start in enumerate(range(0, examples, TEST_BATCH)):
            batch = task.batch("test", seed=seed, index=index, batch_size=min(TEST_BATCH, examples - start))
            predictions = {"model": model(batch.inputs.to(device))[:, task.asked].cpu().double(), **task.predict(batch)}
            for name, own in predictions.items():
                error = (own - batch.targets.double()).square().mean(-1).sum(0)
                sums[name] = sums[name] + error if name in sums else error
    return {name: (total / examples).tolist() for name, total in sums.items()}


@checked
def regression_errors(
    model: Any, task: LinearRegression, *, seed: int, examples: int, device: str | torch.device = "cpu"
) -> RegressionErrors:
    """The errors on `examples` test sequences. model: takes inputs [B, T, channels] to outputs [B, T, outputs]."""
    return RegressionErrors(**vector_errors(model, task, seed=seed, examples=examples, device=device))
