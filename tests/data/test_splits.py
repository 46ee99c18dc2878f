"""Train and test share no example: not by luck, and not in tasks so small that chance would collide at once."""

from itertools import combinations, permutations, product

import numpy as np
import pytest

from fastweights.data import MQAR, Copy, RecallTask, SelectiveCopy, ShuffledMQAR, StateTracking, make_task
from fastweights.data._splits import is_test
from fastweights.training import RecallRun
from fastweights.training.recall.batches import training_batches

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


def every_sequence(tokens: range, length: int) -> set[Example]:
    return {frozenset(enumerate(sequence)) for sequence in product(tokens, repeat=length)}


# Sizes at which two thousand draws hold all possible examples, so that two splits without a rule would share most of them.
TINY: dict[str, tuple[dict[str, int], set[Example]]] = {
    "mqar": ({"pairs": 2, "vocab_size": 12}, every_example(range(1, 6), range(6, 12), 2)),
    "mqar-shuffled": ({"pairs": 2, "vocab_size": 12}, every_example(range(2, 6), range(6, 12), 2)),
    "copy": ({"pairs": 3, "vocab_size": 6}, every_sequence(range(2, 6), 3)),
    "palindrome": ({"pairs": 3, "vocab_size": 6}, every_sequence(range(2, 6), 3)),
    "selective-copy": ({"pairs": 3, "vocab_size": 6, "length": 9}, every_sequence(range(2, 6), 3)),
    "parity": ({"pairs": 8, "vocab_size": 2}, every_sequence(range(2), 8)),
    "s3": ({"pairs": 3, "vocab_size": 6}, every_sequence(range(6), 3)),
    "s5": ({"pairs": 1, "vocab_size": 120}, every_sequence(range(120), 1)),
}
OUT_OF_DISTRIBUTION = ("mqar-ood", "mqar-shuffled-ood")  # their keys differ by themselves


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_task_splits_all_possible_examples(name: str) -> None:
    options, possible = TINY[name]
    task = make_task(name, **options)
    assert isinstance(task, RecallTask)
    train, test = examples(task, "train", range(20)), examples(task, "test", range(20))
    assert not train & test
    assert train | test == possible
    assert 0.15 < len(test) / len(possible) < 0.35


@pytest.mark.parametrize("name", OUT_OF_DISTRIBUTION)
def test_keys_out_of_distribution_are_in_one_split(name: str) -> None:
    task = make_task(name, pairs=2, vocab_size=12)
    assert isinstance(task, RecallTask)
    keys = [{key for row in examples(task, split, range(20)) for key, _ in row} for split in ("train", "test")]
    assert not keys[0] & keys[1]


def test_a_fixed_training_set_and_fresh_batches_hold_no_test_example() -> None:
    """What a run trains on, of a task with 256 examples in all."""
    for train_examples in (None, 64):
        run = RecallRun(
            task="parity",
            mixer="gdn",
            pairs=8,
            vocab_size=2,
            learning_rate=0.1,
            steps=40,
            train_examples=train_examples,
        )
        task = run.make_task()
        assert isinstance(task, RecallTask)
        trained = {pairs_of(row, task) for batch in training_batches(run, 0) for row in batch.input_ids.tolist()}
        assert len(trained) > 40 and not trained & examples(task, "test", range(20))


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
    if task.name in (*TINY, *OUT_OF_DISTRIBUTION):  # of which pairs_of knows the examples
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
