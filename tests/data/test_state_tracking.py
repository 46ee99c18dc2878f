"""Word problems: every label is the composition of the permutations up to it, computed here by hand."""

from itertools import permutations

import numpy as np
import pytest

from fastweights.data import S3, S5, Parity, StateTracking
from fastweights.data._splits import is_test

TASKS = {Parity: 2, S3: 3, S5: 5}


def states(tokens: list[int], items: int) -> list[int]:
    """Items in their places after each permutation, as the number of that arrangement."""
    numbered = list(permutations(range(items)))
    state, found = tuple(range(items)), []
    for token in tokens:
        g = numbered[token]
        state = tuple(g[place] for place in state)
        found.append(numbered.index(state))
    return found


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("elements", ["all", "swaps"])
def test_labels_follow_from_the_tokens(kind: type[StateTracking], split: str, elements: str) -> None:
    task = kind(pairs=30, vocab_size=120, elements=elements)
    batch = task.batch(split, seed=1, index=2, batch_size=20)
    for tokens, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        assert labels == states(tokens, TASKS[kind])


def test_parity_is_the_sum_of_the_bits() -> None:
    tokens, labels = Parity(pairs=50, vocab_size=2).batch("train", seed=0, index=0, batch_size=40)
    assert set(tokens.unique().tolist()) == {0, 1}
    assert labels.tolist() == (tokens.cumsum(1) % 2).tolist()


def test_the_order_of_composition() -> None:
    """Exchange the first two items, then the last two: 0 -> 1 -> 2, 1 -> 0 -> 0, 2 -> 2 -> 1."""
    numbered = list(permutations(range(3)))
    first, second, result = (numbered.index(g) for g in ((1, 0, 2), (0, 2, 1), (2, 0, 1)))
    associations = np.array([[[0, 1], [first, second]]])
    assert S3(pairs=2).lay_out(None, associations)[1].tolist() == [[first, result]]  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "number"), [(Parity, 2), (S3, 6), (S5, 120)])
def test_elements_are_uniform(kind: type[StateTracking], number: int) -> None:
    tokens = kind(pairs=60, vocab_size=120).batch("train", seed=0, index=0, batch_size=1000).input_ids
    share = np.bincount(tokens.flatten(), minlength=number) / tokens.numel()
    assert len(share) == number
    np.testing.assert_allclose(share, 1 / number, atol=4 * (1 / number / tokens.numel()) ** 0.5)


def test_swaps_move_two_items_or_none() -> None:
    tokens = S5(pairs=60, vocab_size=120, elements="swaps").batch("train", seed=0, index=0, batch_size=100).input_ids
    numbered = list(permutations(range(5)))
    drawn = {numbered[token] for token in tokens.unique().tolist()}
    moved = [sum(g[item] != item for item in range(5)) for g in drawn]
    assert sorted(moved) == [0] + [2] * 10


def test_a_test_may_be_longer_than_the_training() -> None:
    task = S3(pairs=12, test_length=30)
    train, test = (task.batch(split, seed=0, index=0, batch_size=50) for split in ("train", "test"))
    assert train.labels.shape == (50, 12) and test.labels.shape == (50, 30) and task.length == 12
    for tokens, labels in zip(test.input_ids.tolist(), test.labels.tolist(), strict=True):
        assert labels == states(tokens, 3)
        assert is_test(np.array([[range(30), tokens]]))[0]


@pytest.mark.parametrize("options", [{}, {"test_length": 30}], ids=str)
@pytest.mark.parametrize("kind", TASKS)
def test_chance(kind: type[StateTracking], options: dict[str, int]) -> None:
    """Right are the first token of a sequence, and one answer in the size of the group."""
    task = kind(pairs=12, vocab_size=120, **options)
    test = task.batch("test", seed=0, index=0, batch_size=4000)
    right = (test.labels == test.input_ids).float()
    assert right[:, 0].min() == 1
    assert right.mean().item() == pytest.approx(task.chance, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "error", "options", "message"),
    [
        (
            Parity,
            ValueError,
            {"length": 13},
            "length must be that of the sequence, 12 .pairs., for task 'parity', got 13",
        ),
        (Parity, ValueError, {"length": 11}, "length must be at least 12"),
        (Parity, ValueError, {"vocab_size": 1}, "vocab_size must be at least 2, the states of task 'parity', got 1"),
        (S5, ValueError, {"vocab_size": 119}, "vocab_size must be at least 120"),
        (S3, ValueError, {"elements": "cycles"}, "elements must be one of 'all', 'swaps', got 'cycles'"),
        (S3, ValueError, {"test_length": 0}, "test_length must be a positive whole number, got 0"),
        (S3, TypeError, {"test_length": 20.0}, "test_length must be a positive whole number, got 20.0"),
    ],
)
def test_bad_options(kind: type[StateTracking], error: type[Exception], options: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        kind(pairs=12, **options)
