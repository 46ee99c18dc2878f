"""The mark 'at chance' is given for the noise of the test and no more; 'below chance' is another one."""

import numpy as np
import pytest

from fastweights.results import summarize
from fastweights.results.marks import compared_with_chance

from .made_up import made_up


@pytest.mark.parametrize("queries", [200, 4096])
@pytest.mark.parametrize("chance", [0.5, 0.25, 1 / 16])
def test_guessers_are_at_chance(chance, queries):
    right = np.random.default_rng(0).binomial(queries, chance, size=2000)
    standings = [compared_with_chance(count / queries, chance, queries) for count in right]
    assert standings.count("at chance") > 0.99 * len(standings)


def test_more_queries_tell_smaller_differences_apart():
    assert compared_with_chance(0.26, 0.25, 400) == "at chance"
    assert compared_with_chance(0.26, 0.25, 40_000) == "above chance"
    assert compared_with_chance(0.24, 0.25, 400) == "at chance"
    assert compared_with_chance(0.24, 0.25, 40_000) == "below chance"


def test_almost_nothing_right_is_below_chance():
    assert compared_with_chance(0.008, 0.25, 1024) == "below chance"
    assert compared_with_chance(0.0, 1 / 64, 100) == "at chance"  # 1.6 would be right by chance


def test_where_one_value_is_shown_every_error_is_below_chance():
    assert compared_with_chance(1.0, 1.0, 10) == "at chance"
    assert compared_with_chance(0.9, 1.0, 10) == "below chance"


def standing(*results):
    (row,) = summarize(results)
    return row.standing


def test_a_row_stands_by_all_queries_of_its_best_runs():
    pair = [made_up(seed=seed, accuracy=0.265, chance=0.25, queries=4096) for seed in range(4)]
    assert standing(pair[0]) == "at chance" and standing(*pair) == "above chance"
    assert standing(made_up(accuracy=0.265, queries=100_000)) == "above chance"  # chance 1 / pairs
    assert standing(made_up(accuracy=0.29)) == "at chance"  # queries not recorded: at least the 1024 test sequences
    assert standing(made_up(accuracy=0.30)) == "above chance"
    assert standing(made_up(accuracy=0.5, chance=0.5, queries=4096)) == "at chance"  # of the task, not 1 / pairs


def test_diverged_runs_are_not_below_chance():
    """Their accuracy counts as 0 in the mean, and says nothing about guessing."""
    assert standing(made_up(seed=0, accuracy=None), made_up(seed=1, accuracy=0.25)) == "at chance"
    assert standing(made_up(accuracy=None)) is None
