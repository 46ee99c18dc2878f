"""Tasks by name: every one is described, and bad names and options are refused with a remedy."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from fastweights.data import MQAR, TASKS, OutOfDistributionMQAR, RecallTask, make_task


def test_names() -> None:
    names = [
        *("mqar", "mqar-shuffled", "copy", "mqar-ood", "mqar-shuffled-ood", "palindrome", "selective-copy"),
        *("parity", "s3", "s5", "regression"),
    ]
    assert list(TASKS)[: len(names)] == names  # then others, and those of users


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_described_and_built_by_its_name(name: str) -> None:
    task = make_task(name, pairs=4)
    assert type(task) is TASKS[name] and task.name == name
    assert task.summary and "\n" not in task.summary and len(task.summary) < 80
    assert task.pairs == 4 and task.length >= 4
    assert getattr(task, "vocab_size", 8192) == 8192


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *(("mqar", 16), ("mqar-shuffled", 13), ("copy", 8), ("mqar-ood", 16), ("mqar-shuffled-ood", 13)),
        *(("palindrome", 8), ("selective-copy", 8)),
    ],
)
def test_the_default_length_is_the_shortest_that_holds_the_task(name: str, length: int) -> None:
    assert make_task(name, pairs=4).length == length
    assert make_task(name, pairs=4, length=length + 1).length == length + 1
    with pytest.raises(ValueError, match=f"length must be at least {length}"):
        make_task(name, pairs=4, length=length - 1)


def test_options_reach_the_task() -> None:
    task = make_task("mqar", pairs=4, length=20, vocab_size=64, power_a=0.5, random_non_queries=False)
    assert task == MQAR(pairs=4, length=20, vocab_size=64, power_a=0.5, random_non_queries=False)
    assert make_task("mqar-ood", pairs=4, held_out_keys=0.25) == OutOfDistributionMQAR(pairs=4, held_out_keys=0.25)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mqar-shufled", {}, "did you mean 'mqar-shuffled'"),
        ("nonsense", {}, "'mqar', 'mqar-shuffled', 'copy', 'mqar-ood'"),
        ("mqar", {"power": 1.0}, "did you mean 'power_a'"),
        ("copy", {"power_a": 1.0}, "an option of task 'copy'"),
        ("mqar", {"held_out_keys": 0.5}, "an option of task 'mqar'"),
    ],
)
def test_unknown_names_and_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(name, pairs=4, **options)


@pytest.mark.parametrize("name", [name for name, kind in TASKS.items() if issubclass(kind, RecallTask)])
@pytest.mark.parametrize("option", ["pairs", "length", "vocab_size"])
@pytest.mark.parametrize(
    "error, bad",
    [
        (ValueError, 0),
        (ValueError, -1),
        (TypeError, 16.0),
        (TypeError, True),
        (TypeError, "16"),
        (TypeError, np.float64(16)),
    ],
)
def test_sizes_that_are_no_positive_integers(name: str, option: str, error: type[Exception], bad: object) -> None:
    options: dict[str, Any] = {"pairs": 4, "length": 16, "vocab_size": 64}
    with pytest.raises(error, match=option):
        make_task(name, **(options | {option: bad}))


def test_numpy_integers_are_integers() -> None:
    assert make_task("mqar", pairs=np.int64(4), length=np.int32(16)) == make_task("mqar", pairs=4, length=16)


def test_tasks_are_frozen_and_comparable() -> None:
    task = make_task("mqar", pairs=4)
    with pytest.raises(FrozenInstanceError):
        task.pairs = 5  # type: ignore[misc]
    assert replace(task, pairs=3).pairs == 3 and hash(task) == hash(make_task("mqar", pairs=4))
