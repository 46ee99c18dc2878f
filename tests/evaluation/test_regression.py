"""Errors of in-context regression: the exact predictors are the best ones, and a model is measured by what it predicts."""

from __future__ import annotations

import pytest
import torch

from fastweights.data import make_task
from fastweights.data.regression import kalman_predictions, ridge_predictions
from fastweights.evaluation import regression_errors
from fastweights.models import FastWeightsConfig, VectorModel
from fastweights.ops import recursive_least_squares


def draw(**options):
    task = make_task("regression", pairs=14, inputs=5, outputs=2, **options)
    batch = task.batch("test", seed=0, index=0, batch_size=7)
    return task, batch.inputs[:, 0::2, :5].double(), batch.targets.double()


def test_ridge_is_the_minimiser_of_its_loss():
    _, x, y = draw(noise=0.4)
    predictions = ridge_predictions(x, y, penalty=0.8)
    assert (predictions[:, 0] == 0).all()
    for row in range(7):
        for place in range(1, 14):
            W = torch.zeros(5, 2, dtype=torch.float64, requires_grad=True)
            past, known = x[row, :place], y[row, :place]
            W = torch.linalg.lstsq(  # the penalty as five more examples
                torch.cat([past, 0.8**0.5 * torch.eye(5).double()]), torch.cat([known, torch.zeros(5, 2).double()])
            ).solution
            torch.testing.assert_close(predictions[row, place], x[row, place] @ W)


def test_ridge_is_the_memory_of_recursive_least_squares():
    """Interleaved as in the task: a token that asks has weight 0, one that brings y has the x before it as its key."""
    _, x, y = draw(noise=0.4)
    k, v = x.repeat_interleave(2, 1)[:, :, None], y.repeat_interleave(2, 1)[:, :, None]
    beta = torch.tensor([0.0, 1.0]).double().repeat(14).expand(7, 28)[..., None]
    o, _ = recursive_least_squares(k, k, v, beta, ridge=0.8, scale=1.0)
    torch.testing.assert_close(o[:, 0::2, 0], ridge_predictions(x, y, penalty=0.8))


def test_without_drift_the_kalman_filter_is_ridge_regression():
    task, x, y = draw(noise=0.4)
    ridge = ridge_predictions(x, y, penalty=5 * 0.4**2)
    torch.testing.assert_close(kalman_predictions(x, y, noise=0.4, drift=0.0), ridge)


def test_the_kalman_filter_is_the_posterior_mean():
    """The joint normal distribution of all y, written out: Cov(y_s, y_t) = x_s x_t a^|s - t| / d (+ noise^2)."""
    _, x, y = draw(noise=0.3, drift=0.5)
    found = kalman_predictions(x, y, noise=0.3, drift=0.5)
    places = torch.arange(14)
    decay = (1 - 0.5**2) ** (0.5 * (places[:, None] - places).abs().double())
    covariance = x @ x.mT / 5 * decay + 0.09 * torch.eye(14).double()
    for place in range(1, 14):
        weights = torch.linalg.solve(covariance[:, :place, :place], covariance[:, :place, place, None])
        torch.testing.assert_close(found[:, place], (weights.mT @ y[:, :place]).squeeze(1))


@pytest.mark.parametrize("options", [{"noise": 0.3}, {"noise": 0.3, "drift": 0.4}], ids=["noise", "drift"])
def test_the_best_predictor_beats_what_is_near_it(options):
    task = make_task("regression", pairs=20, inputs=4, **options)
    batch = task.batch("test", seed=0, index=0, batch_size=2000)
    x, y = batch.inputs[:, 0::2, :4].double(), batch.targets.double()

    def error(**changes):
        given = {"noise": 0.3, "drift": 0.0, **options, **changes}
        return (kalman_predictions(x, y, **given) - y).square().mean().item()

    assert error() < min(error(noise=0.15), error(noise=0.6), error(drift=options.get("drift", 0) + 0.2))
    if "drift" in options:
        assert error() < error(drift=0.2)


class Predictor(torch.nn.Module):
    """Predicts y_i = answers(x, y) from the tokens."""

    def __init__(self, predict):
        super().__init__()
        self.predict, self.modes = predict, []

    def forward(self, tokens):
        self.modes.append((self.training, torch.is_grad_enabled(), len(tokens)))
        x, y = tokens[:, 0::2, :5], tokens[:, 1::2, 5:]
        return self.predict(x.double(), y.double()).float().repeat_interleave(2, 1)


def test_a_model_is_measured_by_its_predictions_on_all_test_sequences():
    task, _, _ = draw(noise=0.4)
    zero = Predictor(lambda x, y: torch.zeros_like(y)).train()
    found = regression_errors(zero, task, seed=3, examples=300)
    assert zero.modes == [(False, False, 128), (False, False, 128), (False, False, 44)] and zero.training
    targets = torch.cat(
        [task.batch("test", seed=3, index=i, batch_size=size).targets for i, size in enumerate((128, 128, 44))]
    )
    assert found.model == pytest.approx(targets.double().square().mean((0, 2)).tolist())
    ridge = Predictor(lambda x, y: ridge_predictions(x, y, penalty=5 * 0.16))
    found = regression_errors(ridge, task, seed=3, examples=300)
    assert found.model == pytest.approx(found.ridge, rel=1e-4) and found.kalman == pytest.approx(found.ridge)


def test_without_noise_ridge_is_right_after_as_many_examples_as_inputs():
    task, _, _ = draw()
    found = regression_errors(Predictor(lambda x, y: torch.zeros_like(y)), task, seed=0, examples=50)
    assert max(found.ridge[6:]) < 1e-4 < 0.05 < min(found.ridge[:4])


def test_the_model_reads_vectors_and_is_causal():
    torch.manual_seed(0)
    config = FastWeightsConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_heads=2, mixer="gdn")
    model = VectorModel(config, inputs=7, outputs=2)
    x = torch.randn(3, 10, 7)
    y = model(x)
    assert y.shape == (3, 10, 2)
    torch.testing.assert_close(model(x[:, :6]), y[:, :6])
    assert model.state_size(10) == 2 * 2 * 8 * 8
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert not any("embed" in name for name, _ in model.named_parameters())
