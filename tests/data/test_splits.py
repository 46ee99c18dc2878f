"""Train and test share no example: not by luck, and not in tasks so small that chance would collide at once."""

from itertools import combinations, permutations, product

import numpy as np
import pytest

from fastweights.data import MQAR, Copy, RecallTask, SelectiveCopy, ShuffledMQAR, StateTracking
from fastweights.data._splits import is_test

Example = frozenset[tuple[int, int]]


def pairs_of(tokens: list[int], task: RecallTask) -> Example:
    if isinstance(task, (Copy, StateTracking)):
        return frozenset(enumerate(tokens[: task.pairs]))
    if isinstance(task, SelectiveCopy):
        return frozenset(enumerate(token for token in tokens if token > 1))
    return frozenset(zip(tokens[0 : 2 * task.pairs : 2], tokens[1 : 2 * task.pairs : 2], strict=True))


def examples(task: RecallTask, split: str, seeds: range, batch_size: int = 200) -> set[Example]:
    return {
        pairs_of(tokens, task)
        for seed in seeds
        for tokens in task.batch(split, seed=seed, index=seed % 3, batch_size=batch_size).input_ids.tolist()
    }


def every_example(keys: range, values: range, pairs: int) -> set[Example]:
    return {
        frozenset(zip(some_keys, some_values, strict=True))
        for some_keys in combinations(keys, pairs)
        for some_values in permutations(values, pairs)
    }


def test_tiny_mqar_splits_all_possible_examples() -> None:
    task = MQAR(pairs=2, vocab_size=12)
    train, test = examples(task, "train", range(20)), examples(task, "test", range(20))
    assert not train & test
    assert train | test == every_example(range(1, 6), range(6, 12), 2)
    assert 0.15 < len(test) / len(train | test) < 0.35


def test_tiny_copy_splits_all_possible_examples() -> None:
    task = Copy(pairs=3, vocab_size=6)
    train, test = examples(task, "train", range(10)), examples(task, "test", range(10))
    assert not train & test
    assert train | test == {frozenset(enumerate(tokens)) for tokens in product(range(2, 6), repeat=3)}


def test_splits_are_disjoint_whatever_the_length_the_vocabulary_and_the_task() -> None:
    train = examples(MQAR(pairs=1, vocab_size=20), "train", range(5))
    for other in (MQAR(pairs=1, vocab_size=20, length=40, power_a=1.0), ShuffledMQAR(pairs=1, vocab_size=20)):
        assert not train & examples(other, "test", range(5))
    narrow, wide = MQAR(pairs=1, vocab_size=20), MQAR(pairs=1, vocab_size=21)  # halves begin at 10 in both
    assert not examples(narrow, "train", range(5)) & examples(wide, "test", range(5))


def test_no_sequence_is_in_both_splits(task: RecallTask) -> None:
    train = {tuple(row) for row in task.batch("train", seed=0, index=0, batch_size=300).input_ids.tolist()}
    test = {tuple(row) for row in task.batch("test", seed=0, index=0, batch_size=300).input_ids.tolist()}
    assert not train & test
    assert not examples(task, "train", range(3)) & examples(task, "test", range(3))


def test_the_split_does_not_depend_on_the_order_of_the_pairs() -> None:
    rng = np.random.default_rng(0)
    associations = rng.integers(0, 8192, (200, 2, 6))
    order = rng.permutation(6)
    assert is_test(associations).any() and not is_test(associations).all()
    np.testing.assert_array_equal(is_test(associations), is_test(associations[:, :, order]))


def test_one_example_in_four_is_a_test_example() -> None:
    rng = np.random.default_rng(0)
    for pairs in (1, 2, 64):
        assert abs(is_test(rng.integers(0, 8192, (20_000, 2, pairs))).mean() - 0.25) < 0.015


def test_both_splits_keep_the_distribution_of_the_keys() -> None:
    task = MQAR(pairs=2, vocab_size=42)
    for split in ("train", "test"):
        keys = task.batch(split, seed=0, index=0, batch_size=20_000).input_ids[:, 0:4:2]
        assert abs(np.bincount(keys.flatten(), minlength=21)[1:] / keys.numel() - 0.05).max() < 0.01


def tiny_tasks() -> list[tuple[type[RecallTask], int, int, list[Example]]]:
    """Tasks with few possible examples, and all of these."""
    tasks: list[tuple[type[RecallTask], int, int, list[Example]]] = []
    for pairs, vocab_size in product((1, 2, 3), range(4, 12)):
        half = vocab_size // 2
        mqar = every_example(range(1, half), range(half, vocab_size), pairs)
        tasks.append((MQAR, pairs, vocab_size, sorted(mqar, key=sorted)))
        copies = product(range(2, vocab_size - 1), repeat=pairs)
        tasks.append((Copy, pairs, vocab_size - 1, [frozenset(enumerate(tokens)) for tokens in copies]))
    return tasks


def test_a_task_is_refused_exactly_when_a_split_would_be_empty() -> None:
    refused = 0
    for kind, pairs, vocab_size, possible in tiny_tasks():
        in_test = [bool(is_test(np.array([sorted(example)]).transpose(0, 2, 1))[0]) for example in possible]
        if any(in_test) and not all(in_test):
            for split in ("train", "test"):
                kind(pairs=pairs, vocab_size=vocab_size).batch(split, seed=0, index=0, batch_size=100)
        else:
            refused += len(possible) > 0
            with pytest.raises(ValueError, match="raise vocab_size"):
                kind(pairs=pairs, vocab_size=vocab_size)
    assert refused  # for want of examples, and not only of tokens
