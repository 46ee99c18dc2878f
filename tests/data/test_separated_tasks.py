"""The shuffled-query form of MQAR and the copy task, re-derived from the tokens alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.data import IGNORE_INDEX, Copy, OutOfDistributionShuffledMQAR, Palindrome, ShuffledMQAR

PADDING, SEPARATOR = 0, 1
batch_arguments = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**63 - 1), "index": st.integers(0, 2**63 - 1), "batch_size": st.integers(1, 6)}
)
splits = st.sampled_from(["train", "test"])


@settings(deadline=None, max_examples=50, derandomize=True)
@given(pairs=st.integers(1, 9), extra=st.integers(0, 20), room=st.integers(4, 300), split=splits, which=batch_arguments)
def test_shuffled_queries(pairs: int, extra: int, room: int, split: str, which: dict) -> None:
    task = ShuffledMQAR(pairs=pairs, length=3 * pairs + 1 + extra, vocab_size=2 * pairs + 4 + room)
    input_ids, labels = task.batch(split, **which)
    assert input_ids.shape == labels.shape == (which["batch_size"], task.length)
    half = task.vocab_size // 2
    for tokens, row_labels in zip(input_ids.tolist(), labels.tolist(), strict=True):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert set(keys) <= set(range(2, half)) and set(values) <= set(range(half, task.vocab_size))
        assert tokens[2 * pairs : -pairs] == [PADDING] * extra + [SEPARATOR]
        assert sorted(tokens[-pairs:]) == sorted(keys)
        value_of = dict(zip(keys, values, strict=True))
        assert row_labels == [IGNORE_INDEX] * (task.length - pairs) + [value_of[key] for key in tokens[-pairs:]]


def test_every_order_of_the_queries_is_equally_likely() -> None:
    tokens = ShuffledMQAR(pairs=3, vocab_size=30).batch("train", seed=1, index=0, batch_size=12_000).input_ids
    place = (tokens[:, -3:, None] == tokens[:, None, 0:6:2]).int().argmax(2)  # which pair each query asks for
    orders, counts = np.unique(place.numpy(), axis=0, return_counts=True)
    assert len(orders) == 6
    np.testing.assert_allclose(counts / 12_000, 1 / 6, atol=0.013)


def test_ordered_queries_are_in_the_order_of_the_pairs() -> None:
    task = ShuffledMQAR(pairs=5, length=20, vocab_size=30, query_order="ordered")
    tokens, labels = task.batch("test", seed=0, index=0, batch_size=100)
    assert tokens[:, -5:].tolist() == tokens[:, 0:10:2].tolist()
    assert labels[:, -5:].tolist() == tokens[:, 1:10:2].tolist()


@pytest.mark.parametrize("query_order", ["shuffled", "ordered"])
def test_padding_at_the_start_moves_the_padding_alone(query_order: str) -> None:
    middle, start = (
        ShuffledMQAR(pairs=4, length=20, vocab_size=30, query_order=query_order, padding=padding)
        for padding in ("middle", "start")
    )
    tokens, labels = start.batch("train", seed=0, index=0, batch_size=50)
    wanted = middle.batch("train", seed=0, index=0, batch_size=50)
    assert (tokens[:, :7] == PADDING).all() and (wanted.input_ids[:, 8:15] == PADDING).all()
    assert tokens[:, 7:15].tolist() == wanted.input_ids[:, :8].tolist()
    assert tokens[:, 15:].tolist() == wanted.input_ids[:, 15:].tolist() and labels.tolist() == wanted.labels.tolist()


def test_random_non_queries_are_uniform_over_the_content() -> None:
    task = ShuffledMQAR(pairs=1, length=7, vocab_size=12, random_non_queries=True)  # k v filler filler filler SEP k
    tokens, labels = task.batch("train", seed=0, index=0, batch_size=10_000)
    share = np.bincount(tokens[:, 2:5].flatten(), minlength=12) / (3 * len(tokens))
    np.testing.assert_allclose(share, [0, 0, *[0.1] * 10], atol=0.007)
    assert (tokens[:, 5] == SEPARATOR).all() and tokens[:, 6].tolist() == tokens[:, 0].tolist()
    assert labels[:, 6].tolist() == tokens[:, 1].tolist() and (labels[:, :6] == IGNORE_INDEX).all()


def test_out_of_distribution_keys_are_values_in_training() -> None:
    """The setting of VLA's table 13, but for the two special tokens."""
    task = OutOfDistributionShuffledMQAR(pairs=8, vocab_size=128)
    train, test = (task.batch(split, seed=0, index=0, batch_size=600) for split in ("train", "test"))
    assert set(train.input_ids[:, 0:16:2].unique().tolist()) == set(range(2, 64))
    assert set(train.input_ids[:, 1:16:2].unique().tolist()) == set(range(64, 128))
    assert set(test.input_ids[:, 0:16:2].unique().tolist()) == set(range(64, 127))
    assert set(test.input_ids[:, 1:16:2].unique().tolist()) == set(range(64, 127))
    for tokens, labels in zip(test.input_ids.tolist(), test.labels.tolist(), strict=True):
        assert len(set(tokens[:16])) == 16 and tokens[16] == SEPARATOR
        value_of = dict(zip(tokens[0:16:2], tokens[1:16:2], strict=True))
        assert labels == [IGNORE_INDEX] * 17 + [value_of[key] for key in tokens[17:]]


def test_training_on_the_out_of_distribution_task_is_training_on_the_shuffled_one() -> None:
    sizes = {"pairs": 8, "length": 40, "vocab_size": 128}
    known, held_out = ShuffledMQAR(**sizes), OutOfDistributionShuffledMQAR(**sizes)
    for one, two in zip(
        *(task.batch("train", seed=3, index=5, batch_size=64) for task in (known, held_out)), strict=True
    ):
        assert one.tolist() == two.tolist()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    pairs=st.integers(2, 12), extra=st.integers(0, 20), room=st.integers(0, 300), split=splits, which=batch_arguments
)
def test_copy(pairs: int, extra: int, room: int, split: str, which: dict) -> None:
    task = Copy(pairs=pairs, length=2 * pairs + extra, vocab_size=10 + room)
    input_ids, labels = task.batch(split, **which)
    assert input_ids.shape == labels.shape == (which["batch_size"], task.length)
    for tokens, row_labels in zip(input_ids.tolist(), labels.tolist(), strict=True):
        sequence = tokens[:pairs]
        assert set(sequence) <= set(range(2, task.vocab_size))
        assert tokens[pairs:] == [PADDING] * extra + [SEPARATOR] + sequence[:-1]
        assert row_labels == [IGNORE_INDEX] * (task.length - pairs) + sequence


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    pairs=st.integers(2, 12), extra=st.integers(0, 20), room=st.integers(0, 300), split=splits, which=batch_arguments
)
def test_palindrome(pairs: int, extra: int, room: int, split: str, which: dict) -> None:
    task = Palindrome(pairs=pairs, length=2 * pairs + extra, vocab_size=10 + room)
    for tokens, labels in zip(*(tensor.tolist() for tensor in task.batch(split, **which)), strict=True):
        backwards = tokens[:pairs][::-1]
        assert set(backwards) <= set(range(2, task.vocab_size))
        assert tokens[pairs:] == [PADDING] * extra + [SEPARATOR] + backwards[:-1]
        assert labels == [IGNORE_INDEX] * (task.length - pairs) + backwards


def test_copying_one_token() -> None:
    tokens, labels = Copy(pairs=1, vocab_size=100).batch("train", seed=0, index=0, batch_size=1)
    assert tokens[0, 1] == SEPARATOR and labels[0].tolist() == [IGNORE_INDEX, tokens[0, 0].item()]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ShuffledMQAR, {"length": 24}, "length must be at least 25"),
        (ShuffledMQAR, {"vocab_size": 19}, "vocab_size must be at least 20"),
        (ShuffledMQAR, {"query_order": "sorted"}, "query_order must be one of 'shuffled', 'ordered', got 'sorted'"),
        (ShuffledMQAR, {"padding": "end"}, "padding must be one of 'middle', 'start', got 'end'"),
        (OutOfDistributionShuffledMQAR, {"vocab_size": 32}, "vocab_size must be at least 33"),
        (OutOfDistributionShuffledMQAR, {"length": 24}, "length must be at least 25"),
        (Palindrome, {"length": 15}, "length must be at least 16"),
        (Copy, {"length": 15}, "length must be at least 16"),
        (Copy, {"vocab_size": 2}, "vocab_size must be at least 3"),
        (Copy, {"vocab_size": 3}, "vocab_size must allow enough"),  # one token: one sequence, so one split is empty
    ],
)
def test_bad_options(kind: type, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(pairs=8, **options)


def test_a_flag_that_is_none() -> None:
    with pytest.raises(TypeError, match="random_non_queries must be True or False"):
        ShuffledMQAR(pairs=2, random_non_queries=1)  # type: ignore[arg-type]


def test_the_smallest_vocabularies_work() -> None:
    tokens = (
        OutOfDistributionShuffledMQAR(pairs=8, vocab_size=33).batch("test", seed=0, index=0, batch_size=2).input_ids
    )
    assert tokens[:, :16].sort().values.tolist() == [list(range(16, 32))] * 2
    assert ShuffledMQAR(pairs=8, vocab_size=20).batch("test", seed=0, index=0, batch_size=2).labels.max() >= 10
    assert Copy(pairs=8, vocab_size=4).batch("test", seed=0, index=0, batch_size=2).labels.max() <= 3
