"""In-context linear regression: vectors and their images under a map that each sequence has of its own."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..checks import LARGEST_WIDTH, check_number, check_size
from ._draws import Draws
from .registry import register_task
from .task import VectorBatch, VectorTask

__all__ = ["LinearRegression", "kalman_predictions", "ridge_predictions"]


_LEAST_VARIANCE = 1e-10  # of the noise, for the predictors: without any, the equations of few examples are singular


@register_task
@dataclass(frozen=True, kw_only=True)
class LinearRegression(VectorTask):
    """n examples of a random linear map, each to be predicted from those before it.

        x_1 y_1 x_2 y_2 ... x_n y_n        target at x_i: y_i = W_i^T x_i + noise e_i

    A token is a vector of d + m channels: x_i in the first d (`inputs`), y_i in the last m (`outputs`), the others 0.
    `pairs` is n; T = 2n. The first map W_1 has independent normal entries of variance 1/d; e_i is standard normal.
    Predicting 0 has the expected squared error 1 + noise^2 per output.

    Options:
    - inputs, outputs: d and m.
    - noise: standard deviation of the noise in y. The targets hold it too.
    - drift: W_(i+1) = sqrt(1 - drift^2) W_i + drift times a new map: 0 keeps the map, 1 draws a new one per example.
    - correlation: of neighbouring channels of x, which is normal with unit variances and covariances correlation^|a - b|.
    - contrast: at least 1. In every sequence half of the channels of x, a random half, have standard deviations that are
      `contrast` times smaller than those of the others; the variances of a sequence have mean 1. No fixed map can undo it.

    Train and test share no first map: it is what `Task` calls the associations.

    Sources: Garg et al. 2022, What Can Transformers Learn In-Context?, section 3 (d = 20, noise and skewed inputs);
    von Oswald et al. 2025, MesaNet, and Preconditioned DeltaNet, section 2.3, on layers as regression.
    ValueError: a length other than 2 pairs, noise below 0, drift outside 0 to 1, a correlation outside -1 to 1, a contrast
    below 1, or above 1 with a single input.
    """

    inputs: int = 8
    noise: float = 0.0
    drift: float = 0.0
    correlation: float = 0.0
    contrast: float = 1.0

    name: ClassVar[str] = "regression"
    summary: ClassVar[str] = "vectors x1 y1 x2 y2 ...; predict yi at xi (linear regression in context)"
    asked: ClassVar[slice] = slice(0, None, 2)

    @property
    def chance(self) -> float:
        """The expected squared error of predicting 0."""
        return 1 + self.noise**2

    @property
    def channels(self) -> int:
        return self.inputs + self.outputs

    def predict(self, batch: VectorBatch) -> dict[str, Tensor]:
        """Exact ridge regression on all examples so far with the penalty d noise^2, which without drift is the best of all
        predictors, and the Kalman filter that knows noise and drift: the best predictor with a drift, equal to ridge without."""
        x, y = batch.inputs[:, 0::2, : self.inputs].double(), batch.targets.double()
        return {
            "ridge": ridge_predictions(x, y, penalty=self.inputs * max(self.noise**2, _LEAST_VARIANCE)),
            "kalman": kalman_predictions(x, y, noise=self.noise, drift=self.drift),
        }

    @property
    def plotted_predictors(self) -> tuple[str, ...]:
        return ("ridge", "kalman") if self.drift else ("ridge",)

    def shortest_length(self) -> int:
        return 2 * self.pairs

    def check_options(self) -> None:
        if self.length != 2 * self.pairs:
            raise ValueError(
                f"length must be {2 * self.pairs}, two tokens per example, for task {self.name!r}, got {self.length}; "
                "leave it out and set pairs"
            )
        self._set("inputs", check_size("inputs", self.inputs, high=LARGEST_WIDTH))
        self._set("noise", check_number("noise", self.noise, low=0))
        self._set("drift", check_number("drift", self.drift, low=0, high=1))
        self._set("correlation", check_number("correlation", self.correlation, above=-1, below=1))
        self._set("contrast", check_number("contrast", self.contrast, low=1, high=1e6))
        if self.contrast > 1 and self.inputs == 1:
            raise ValueError(
                f"contrast must be 1 with a single input, got {self.contrast}; raise inputs, or leave it out"
            )

    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        """The entries of the first map: their indices, and the bits of the numbers."""
        entries = self._map(draws, rows).reshape(rows, -1).view(np.int64)
        return np.stack([np.broadcast_to(np.arange(entries.shape[1]), entries.shape), entries], axis=1)

    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = len(associations)
        W = associations[:, 1].copy().view(np.float64).reshape(rows, self.inputs, self.outputs)
        x = draws.normal((rows, self.pairs, self.inputs))
        for channel in range(1, self.inputs):
            x[:, :, channel] *= math.sqrt(1 - self.correlation * self.correlation)
            x[:, :, channel] += self.correlation * x[:, :, channel - 1]
        if self.contrast > 1:
            x *= self._scales(draws, rows)[:, None]
        y = self.noise * draws.normal((rows, self.pairs, self.outputs))
        together = 1 if self.drift else self.pairs  # examples of one map
        for first in range(0, self.pairs, together):
            part = slice(first, first + together)
            for channel in range(self.inputs):  # one after the other: the order of a sum decides its last bit
                y[:, part] += W[:, None, channel] * x[:, part, channel, None]
            if self.drift:
                W = math.sqrt(1 - self.drift * self.drift) * W + self.drift * self._map(draws, rows)
        tokens = np.zeros((rows, self.length, self.inputs + self.outputs), dtype=np.float32)
        tokens[:, 0::2, : self.inputs] = x
        tokens[:, 1::2, self.inputs :] = y
        return tokens, y.astype(np.float32)

    def _map(self, draws: Draws, rows: int) -> np.ndarray:
        return draws.normal((rows, self.inputs, self.outputs)) / math.sqrt(self.inputs)

    def _scales(self, draws: Draws, rows: int) -> np.ndarray:
        """The standard deviation of every channel of x, [rows, inputs]."""
        weak = self.inputs // 2
        variances = np.ones((rows, self.inputs))
        chosen = draws.distinct(self.inputs, rows, weak)
        np.put_along_axis(variances, chosen, 1 / (self.contrast * self.contrast), axis=1)
        total = self.inputs - weak + weak / (self.contrast * self.contrast)
        return np.sqrt(variances * (self.inputs / total))


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
