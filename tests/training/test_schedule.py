"""The learning rate rises linearly, falls along a cosine and ends near its final fraction."""

import pytest

from fastweights.training import learning_rate_factor


def factors(steps: int, warmup_steps: int, final: float) -> list[float]:
    return [learning_rate_factor(step, steps=steps, warmup_steps=warmup_steps, final=final) for step in range(steps)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert factors(100, 4, 0.1)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_decay_is_a_cosine_to_the_final_fraction():
    values = factors(104, 4, 0.1)
    assert values[54] == pytest.approx(0.55)  # half way
    assert values[29] == pytest.approx(0.1 + 0.9 * 0.8535533905932737)  # a quarter: (1 + cos(pi/4)) / 2
    assert 0.1 < values[-1] < 0.101
    assert all(later < earlier for earlier, later in zip(values[4:], values[5:], strict=False))


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (3, 3), (2, 1)])
def test_very_short_runs_have_positive_factors(steps, warmup_steps):
    assert all(0 < value <= 1 for value in factors(steps, warmup_steps, 0.1))
