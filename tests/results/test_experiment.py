"""The best learning rate of each mixer and difficulty is found, and what it gave is reported."""

import dataclasses
import statistics

import pytest

from fastweights.results import summarize

from .made_up import made_up


def test_one_row_a_mixer_and_difficulty_in_order_of_appearance():
    results = [made_up(mixer, pairs) for mixer in ("linear", "gdn") for pairs in (16, 4)]
    rows = summarize(results)
    assert [(row.mixer, row.pairs) for row in rows] == [("linear", 16), ("linear", 4), ("gdn", 16), ("gdn", 4)]
    assert [row.chance for row in rows[:2]] == [1 / 16, 1 / 4]


def test_the_best_learning_rate_is_that_of_the_best_mean_over_seeds():
    results = [
        made_up(rate=0.1, seed=0, accuracy=1.0),
        made_up(rate=0.1, seed=1, accuracy=0.2),
        made_up(rate=0.2, seed=0, accuracy=0.7),
        made_up(rate=0.2, seed=1, accuracy=0.9),
    ]
    (row,) = summarize(results)
    assert row.learning_rate == 0.2
    assert row.accuracy == pytest.approx(0.8)
    assert row.accuracy_std == pytest.approx(statistics.stdev([0.7, 0.9]))
    assert (row.runs, row.diverged) == (4, 0)


def test_chance_is_that_of_the_task():
    assert summarize([made_up(pairs=40, chance=0.5)])[0].chance == 0.5


def made_up_error(error, rate, seed=0, **changes):
    given = {"measure": "error", "error": error, "chance": 1.0, **changes}
    return made_up(rate=rate, seed=seed, accuracy=None, status="diverged" if error is None else "finished", **given)


def test_the_lowest_error_is_the_best():
    results = [made_up_error(0.7, 0.1), made_up_error(0.3, 0.2), made_up_error(0.5, 0.4)]
    (row,) = summarize([dataclasses.replace(result, best_error=0.125) for result in results])
    assert (row.learning_rate, row.error, row.accuracy, row.measure) == (0.2, 0.3, None, "error")
    assert (row.value, row.best_error, row.standing) == (0.3, 0.125, "above chance")


def test_a_diverged_run_counts_as_predicting_zero():
    results = [
        made_up_error(None, 0.1, 0),
        made_up_error(0.2, 0.1, 1),
        made_up_error(0.5, 0.2, 0),
        made_up_error(0.5, 0.2, 1),
    ]
    (row,) = summarize(results)
    assert (row.learning_rate, row.error, row.diverged) == (0.2, 0.5, 1)
    (row,) = summarize([made_up_error(None, 0.1)])
    assert row.error is None and row.value is None and row.standing is None


def test_a_single_seed_has_no_spread():
    (row,) = summarize([made_up(accuracy=0.7)])
    assert row.accuracy == 0.7 and row.accuracy_std is None


def test_equal_accuracies_are_decided_by_the_loss():
    results = [made_up(rate=0.1, losses=[2.0, 0.5]), made_up(rate=0.2, losses=[2.0, 0.1])]
    assert summarize(results)[0].learning_rate == 0.2


def test_marks_are_those_of_the_best_learning_rate():
    results = [made_up(rate=0.1, accuracy=0.9), made_up(rate=0.2, accuracy=0.1, undertrained=True)]
    assert not summarize(results)[0].undertrained
    results = [made_up(rate=0.1, accuracy=0.9, undertrained=True), made_up(rate=0.2, accuracy=0.1)]
    assert summarize(results)[0].undertrained


def test_a_diverged_run_counts_as_nothing_right():
    results = [
        made_up(rate=0.1, seed=0, accuracy=None),
        made_up(rate=0.1, seed=1, accuracy=0.8),
        made_up(rate=0.2, seed=0, accuracy=0.5),
        made_up(rate=0.2, seed=1, accuracy=0.5),
    ]
    (row,) = summarize(results)
    assert (row.learning_rate, row.accuracy, row.diverged) == (0.2, 0.5, 1)


def test_when_every_run_diverged_there_is_no_accuracy():
    (row,) = summarize([made_up(accuracy=None, losses=[], loss_steps=[])])
    assert row.accuracy is None and row.learning_rate is None and row.accuracy_std is None
    assert (row.diverged, row.runs) == (1, 1)
