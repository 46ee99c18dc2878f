"""In-context regression: the sequences follow from a map that is drawn as documented."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.data import LinearRegression, make_task
from fastweights.data._draws import Draws
from fastweights.data._splits import is_test

# sha256 of inputs and targets as little-endian float32: must never change, on any machine or version
PINNED = "b5f8e78ba7e24fcc19d9f7930ba19cfb2e1b4830a9c4561c51602bd0f9b4666a"


def examples(
    task: LinearRegression, split: str = "train", rows: int = 64, **which: int
) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, n, d] and y [rows, n, m] as they stand in the tokens, float64."""
    tokens, targets = task.batch(split, **{"seed": 0, "index": 0, **which}, batch_size=rows)
    x, y = tokens[:, 0::2], tokens[:, 1::2]
    assert tokens.dtype == targets.dtype == torch.float32 and tokens.shape[1] == task.length == 2 * task.pairs
    assert tokens.shape[2] == task.inputs + task.outputs
    assert (x[:, :, task.inputs :] == 0).all() and (y[:, :, : task.inputs] == 0).all()
    assert torch.equal(y[:, :, task.inputs :], targets)
    return x[:, :, : task.inputs].double().numpy(), targets.double().numpy()


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 3),
    correlation=st.sampled_from([0.0, 0.7, -0.5]),
    split=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 2**63 - 1),
)
def test_without_noise_one_map_explains_all_examples(
    inputs: int, outputs: int, correlation: float, split: str, seed: int
) -> None:
    task = LinearRegression(pairs=inputs + 6, inputs=inputs, outputs=outputs, correlation=correlation)
    for x, y in zip(*examples(task, split, rows=4, seed=seed), strict=True):
        W = np.linalg.lstsq(x[:inputs], y[:inputs], rcond=None)[0]
        assert np.abs(x[inputs:] @ W - y[inputs:]).max() < 1e-5 * (1 + np.linalg.cond(x[:inputs]) * np.abs(y).max())


def test_moments() -> None:
    task = LinearRegression(pairs=16, inputs=4, correlation=0.6, noise=0.5)
    x, y = examples(task, rows=4000)
    covariance = np.cov(x.reshape(-1, 4).T)
    np.testing.assert_allclose(covariance, 0.6 ** np.abs(np.subtract.outer(range(4), range(4))), atol=0.03)
    assert y.var() == pytest.approx(1.25, abs=0.06) and task.chance == 1.25


def test_noise_is_what_no_map_explains() -> None:
    x, y = examples(LinearRegression(pairs=100, inputs=3, noise=0.25), rows=50)
    residuals = [b - a @ np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)]
    assert np.var(residuals) * 100 / 97 == pytest.approx(0.0625, rel=0.05)


def test_contrast_makes_another_half_of_the_channels_small_in_every_sequence() -> None:
    x, y = examples(LinearRegression(pairs=400, inputs=5, contrast=4), rows=40)
    deviations = np.sort(x.std(1), axis=1)
    np.testing.assert_allclose(deviations[:, 2:].mean(1), 4 * deviations[:, :2].mean(1), rtol=0.2)
    np.testing.assert_allclose(x.var(1).mean(1), 1, atol=0.15)
    weak = {tuple(np.flatnonzero(row)) for row in x.std(1) < deviations[:, 2:3] / 2}
    assert len(weak) > 5 and {len(channels) for channels in weak} == {2}
    for a, b in zip(x, y, strict=True):  # y is still a linear map of x
        np.testing.assert_allclose(a @ np.linalg.lstsq(a, b, rcond=None)[0], b, atol=1e-4)


def test_drift_is_a_stationary_random_walk() -> None:
    """With one input the map is y / x: its variance stays 1, its correlation falls by sqrt(1 - drift^2) per example."""
    x, y = examples(LinearRegression(pairs=12, inputs=1, drift=0.6), rows=20_000)
    W = (y / x)[:, :, 0]
    correlations = np.corrcoef(W.T)[0]
    np.testing.assert_allclose(correlations, 0.8 ** np.arange(12), atol=0.03)
    np.testing.assert_allclose(W.var(0), 1, atol=0.05)
    fixed_x, fixed_y = examples(LinearRegression(pairs=12, inputs=1), rows=5)
    np.testing.assert_allclose((fixed_y / fixed_x)[:, 1:], (fixed_y / fixed_x)[:, :-1], rtol=1e-4)


def test_splits_share_no_map() -> None:
    task = LinearRegression(pairs=3, inputs=2)
    for split in ("train", "test"):
        associations = task.draw_associations(Draws(0, 0, 0), split, 500)
        maps = associations[:, 1].copy().view(np.float64)
        assert maps.std() == pytest.approx(0.5**0.5, rel=0.05) and np.unique(associations[:, 1]).size == 1000
        assert 0.2 < is_test(associations).mean() < 0.3
    # the map can be read off a sequence: it belongs to the split that the sequence was drawn for
    x, y = examples(LinearRegression(pairs=6, inputs=2), "test", rows=200)
    train_x, train_y = examples(LinearRegression(pairs=6, inputs=2), "train", rows=200)
    maps = [np.linalg.lstsq(a, b, rcond=None)[0].ravel() for a, b in zip([*x, *train_x], [*y, *train_y], strict=True)]
    distances = np.abs(np.array(maps)[:200, None] - np.array(maps)[None, 200:]).max(-1)
    assert distances.min() > 1e-3


def test_batches_are_a_function_of_their_arguments() -> None:
    sha = hashlib.sha256()
    for options in (
        {"pairs": 5},
        {"pairs": 9, "inputs": 3, "outputs": 2, "noise": 0.5, "drift": 0.1, "correlation": 0.3},
    ):
        for split in ("train", "test"):
            for seed, index in ((0, 0), (2**40 + 7, 2**35 + 1)):
                for tensor in make_task("regression", **options).batch(split, seed=seed, index=index, batch_size=16):
                    sha.update(tensor.numpy().astype("<f4").tobytes())
    assert sha.hexdigest() == PINNED


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"length": 17}, "length must be 16, two tokens per example, for task 'regression', got 17"),
        (ValueError, {"length": 15}, "length must be at least 16"),
        (ValueError, {"inputs": 0}, "inputs must be a positive whole number"),
        (TypeError, {"outputs": 1.0}, "outputs must be a positive whole number"),
        (ValueError, {"noise": -0.1}, "noise must be a finite number, at least 0"),
        (ValueError, {"drift": 1.1}, "drift must be a finite number, at least 0 and at most 1"),
        (ValueError, {"correlation": 1.0}, "correlation must be a finite number, more than -1 and less than 1"),
        (ValueError, {"contrast": 0.5}, "contrast must be a finite number, at least 1"),
        (ValueError, {"contrast": 2, "inputs": 1}, "contrast must be 1 with a single input"),
        (TypeError, {"noise": "0.1"}, "noise must be a number"),
    ],
)
def test_bad_options(error: type[Exception], options: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        LinearRegression(pairs=8, **options)
