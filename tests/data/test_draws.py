"""The random draws: exact logarithm, exact distributions, separate streams."""

import math
from itertools import permutations

import numpy as np
import pytest

from fastweights.data._draws import Draws, natural_log


def test_natural_log_is_accurate_to_the_last_bits() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.random(2000), 10.0 ** rng.uniform(-300, 300, 2000), 1 - rng.random(2000) * 1e-9, [2.0**-53]]
    )
    wanted = np.array([math.log(value) for value in x])
    np.testing.assert_allclose(natural_log(x), wanted, rtol=4e-15, atol=0)
    assert natural_log(np.ones(1)) == 0


def test_natural_log_is_pinned_to_the_bit() -> None:
    x = np.array([1.5, 1e-9, 0.9999999, 12345.678, 1 / 3])
    assert [value.hex() for value in natural_log(x)] == [
        "0x1.9f323ecbf984cp-2",
        "-0x1.4b927f32bffb8p+4",
        "-0x1.ad7f2b1049ba0p-24",
        "0x1.2d79559791e31p+3",
        "-0x1.193ea7aad030ap+0",
    ]


@pytest.mark.parametrize(("limit", "count"), [(4, 3), (4, 1), (7, 3)])  # dense, and twice sparse
def test_every_ordered_choice_is_equally_likely(limit: int, count: int) -> None:
    rows = 42_000
    chosen = Draws(0, 0, 0).distinct(limit, rows, count)
    choices, counts = np.unique(chosen, axis=0, return_counts=True)
    assert [tuple(choice) for choice in choices.tolist()] == list(permutations(range(limit), count))
    chi_square = ((counts - rows / len(counts)) ** 2 / (rows / len(counts))).sum()
    freedom = len(counts) - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (1000, 1000), (1000, 501), (1000, 500), (8191, 64)])
def test_distinct_integers_are_distinct_and_in_range(limit: int, count: int) -> None:
    chosen = Draws(3, 1, 4).distinct(limit, 8, count)
    assert chosen.shape == (8, count) and chosen.dtype == np.int64
    assert chosen.min() >= 0 and chosen.max() < limit
    assert all(len(set(row)) == count for row in chosen.tolist())


def test_successive_draws_are_proportional_to_the_weights_that_are_left() -> None:
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    drawn = Draws(0, 0, 0).successive(np.log(weights), 40_000, 3)
    choices, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(choices) == 24
    for (first, second, third), count in zip(choices.tolist(), counts, strict=True):
        left = 8 - weights[first]
        wanted = weights[first] / 8 * weights[second] / left * weights[third] / (left - weights[second])
        assert count / 40_000 == pytest.approx(wanted, abs=4 * math.sqrt(wanted / 40_000))


def test_extreme_weights_do_not_overflow() -> None:
    assert Draws(0, 0, 0).successive(np.array([-1e6, 0.0, 1e6]), 5, 3).tolist() == [[2, 1, 0]] * 5


def test_normal_numbers_are_normal_and_independent() -> None:
    x = Draws(0, 0, 0).normal((400, 500))
    assert x.shape == (400, 500) and x.dtype == np.float64 and np.isfinite(x).all()
    moments = [(x**power).mean() for power in range(1, 5)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.05)
    for level, share in ((-1.0, 0.158655), (0.5, 0.691462), (2.0, 0.977250)):
        assert (x < level).mean() == pytest.approx(share, abs=0.004)
    assert abs(np.corrcoef(x.ravel()[::2], x.ravel()[1::2])[0, 1]) < 0.012  # the two of one point of the disc
    assert Draws(0, 0, 0).normal((0, 3)).shape == (0, 3)


def test_normal_numbers_are_pinned_to_the_bit() -> None:
    assert [number.hex() for number in Draws(1, 2, 3).normal((3,)).tolist()] == [
        "-0x1.26308a05b9fa5p-1",
        "0x1.3206e220d010cp+0",
        "-0x1.fd4f1b95bbb7ap-1",
    ]


def test_streams_do_not_overlap() -> None:
    words = [Draws(seed, stream, index).below(2**62, 1000) for seed in (0, 1) for stream in (0, 1) for index in (0, 1)]
    assert len(set(np.concatenate(words).tolist())) == 8000
