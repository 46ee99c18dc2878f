"""The mark 'undertrained': falls that are real and large enough are seen, noise and arrival at zero are not."""

import itertools

import numpy as np
import pytest

from fastweights.results import still_falling, undertrained
from fastweights.training import learning_rate_factor

STEPS = list(range(10, 1001, 10))


def cosine_learning(final):
    factors = [learning_rate_factor(step, steps=1000, warmup_steps=100, final=final) for step in range(1000)]
    learning = list(itertools.accumulate(factors))
    return np.array([learning[step - 1] for step in STEPS])


def noise(size, seed=0):
    return size * np.random.default_rng(seed).standard_normal(len(STEPS))


def judge(losses, learning=None, of=still_falling):
    return of(STEPS, list(losses), list(cosine_learning(0.1) if learning is None else learning))


@pytest.mark.parametrize("rate", ["constant", "cosine"])
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_with_learning_is_seen(rate, seed):
    learning = np.array(STEPS, dtype=float) if rate == "constant" else cosine_learning(0.1)
    losses = 3 - 2 * learning / learning[-1]  # 0.4 nats in a fifth of the learning
    assert judge(losses + noise(0.02, seed), learning)


def test_what_the_schedule_flattens_is_seen_all_the_same():
    learning = cosine_learning(0.0)
    losses = 3 - 2 * learning / learning[-1]
    assert losses[-20] - losses[-1] < 0.1  # flat to the eye: a tenth of what the fifth before fell
    assert judge(losses + noise(0.005), learning)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("level", [0.4, 3.4])
def test_noise_around_a_level_is_not_a_fall(level, seed):
    assert not judge(level + noise(0.005, seed))


def test_a_fall_within_the_noise_is_not_marked():
    """Without the noise the same fall would be."""
    learning = np.array(STEPS, dtype=float)
    losses = 3 - learning / learning[-1]
    alternating = 0.5 * (-1) ** np.arange(len(STEPS))
    assert judge(losses, learning) and not judge(losses + alternating, learning)
    slope = np.polyfit(learning[-20:], (losses + alternating)[-20:], 1)[0]
    assert -slope * 0.2 * learning[-1] > 0.2  # far more than a fall must be


def test_a_fall_too_small_to_matter_is_not_marked():
    learning = cosine_learning(0.1)
    assert not judge(2 - 0.2 * learning / learning[-1])  # 0.04 nats in a fifth of the learning
    assert judge(2 - 0.3 * learning / learning[-1])  # 0.06 nats


def test_a_run_that_has_arrived_at_zero_is_trained_long_enough():
    learning = cosine_learning(0.1)
    falling = 2 * (1 - learning / learning[-1])
    assert not judge(falling + 0.03)
    assert judge(falling + 0.07)


def test_a_rising_loss_is_not_falling():
    assert not judge(1 + np.array(STEPS) / 1000)


def test_a_curve_of_few_points_is_not_judged():
    assert not still_falling([1, 2, 3], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("level", [0.4, 3.4])
def test_a_long_flat_curve_is_trained_long_enough(level, seed):
    assert not judge(level + noise(0.005, seed), of=undertrained)


def test_a_fall_that_is_seen_is_undertrained():
    learning = cosine_learning(0.1)
    assert judge(2 - 0.3 * learning / learning[-1], of=undertrained)


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_could_hide_a_fall_is_undertrained(seed):
    losses = 3 + noise(0.3, seed)
    assert judge(losses, of=undertrained)


@pytest.mark.parametrize("steps", [1, 3, 30, 60, 99])
@pytest.mark.parametrize("level", [0.2, 3.4])
def test_a_short_run_is_undertrained_however_flat(steps, level):
    every = list(range(1, steps + 1))
    assert undertrained(every, [level] * steps, [float(step) for step in every])
    assert not undertrained(every, [0.02] * steps, [float(step) for step in every])  # it has arrived all the same


def test_a_long_run_of_few_points_is_undertrained():
    assert undertrained([100, 200, 300, 400, 500], [2.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])


def test_no_curve_is_undertrained():
    assert undertrained([], [], [])
