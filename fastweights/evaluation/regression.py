"""In-context regression: a model's squared error by example, beside those of the exact predictors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_device, check_size, check_whole_number, describe_value
from ..data import LinearRegression
from ..kinds import checked
from .reading import MOST_EXAMPLES, evaluating

__all__ = ["RegressionErrors", "kalman_predictions", "regression_errors", "ridge_predictions"]

_TEST_BATCH = 128
_LEAST_VARIANCE = 1e-10  # of the noise, for the predictors: without any, the equations of few examples are singular


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


@checked
def regression_errors(
    model: Any, task: LinearRegression, *, seed: int, examples: int, device: str | torch.device = "cpu"
) -> RegressionErrors:
    """The errors on `examples` test sequences. model: takes inputs [B, T, channels] to outputs [B, T, outputs]."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, such as a VectorModel, got {describe_value(model)}")
    check_whole_number("seed", seed)
    check_size("examples", examples, high=MOST_EXAMPLES)
    check_device(device)
    sums = torch.zeros(3, task.pairs, dtype=torch.float64)
    with evaluating(model):
        for index, start in enumerate(range(0, examples, _TEST_BATCH)):
            batch = task.batch("test", seed=seed, index=index, batch_size=min(_TEST_BATCH, examples - start))
            x, y = batch.inputs[:, 0::2, : task.inputs].double(), batch.targets.double()
            predictions = (
                model(batch.inputs.to(device))[:, 0::2].cpu().double(),
                ridge_predictions(x, y, penalty=task.inputs * max(task.noise**2, _LEAST_VARIANCE)),
                kalman_predictions(x, y, noise=task.noise, drift=task.drift),
            )
            sums += torch.stack([(own - y).square().mean(-1).sum(0) for own in predictions])
    return RegressionErrors(**dict(zip(("model", "ridge", "kalman"), (sums / examples).tolist(), strict=True)))


def ridge_predictions(x_BND: Tensor, y_BNM: Tensor, *, penalty: float) -> Tensor:
    """The prediction of every y_i [B, N, M] by the W that minimises sum_(s<i) |W^T x_s - y_s|^2 + penalty |W|^2, solved
    directly in the inputs' precision."""
    gram = _sums_before(x_BND[..., :, None] * x_BND[..., None, :])
    cross = _sums_before(x_BND[..., :, None] * y_BNM[..., None, :])
    W = torch.linalg.solve(gram + penalty * torch.eye(x_BND.shape[-1]).to(gram), cross)
    return (x_BND[..., None, :] @ W).squeeze(-2)


def kalman_predictions(x_BND: Tensor, y_BNM: Tensor, *, noise: float, drift: float) -> Tensor:
    """The posterior means of every y_i [B, N, M] given the examples before it, in the model that `LinearRegression` draws
    from: entries of W have variance 1/D, and W_(i+1) = sqrt(1 - drift^2) W_i + drift times a new map."""
    B, N, D = x_BND.shape
    prior = torch.eye(D).to(x_BND) / D
    W, P = x_BND.new_zeros(B, D, y_BNM.shape[-1]), prior.expand(B, D, D)
    predictions = []
    for x, y in zip(x_BND.unbind(1), y_BNM.unbind(1), strict=True):
        predictions.append((x[:, None] @ W).squeeze(1))
        Px = (P @ x[..., None]).squeeze(-1)
        gain = Px / ((x * Px).sum(-1, keepdim=True) + max(noise**2, _LEAST_VARIANCE))
        W = W + gain[..., None] * (y - predictions[-1])[:, None]
        P = P - gain[..., None] * Px[:, None]
        W, P = (1 - drift**2) ** 0.5 * W, (1 - drift**2) * P + drift**2 * prior
    return torch.stack(predictions, 1)


def _sums_before(x_BNXY: Tensor) -> Tensor:
    """At every i, the sum over all before it."""
    return x_BNXY.cumsum(1) - x_BNXY
