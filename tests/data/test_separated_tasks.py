"""The shuffled-query form of MQAR and the copy task, re-derived from the tokens alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.data import IGNORE_INDEX, Copy, ShuffledMQAR

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


def test_copying_one_token() -> None:
    tokens, labels = Copy(pairs=1, vocab_size=100).batch("train", seed=0, index=0, batch_size=1)
    assert tokens[0, 1] == SEPARATOR and labels[0].tolist() == [IGNORE_INDEX, tokens[0, 0].item()]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ShuffledMQAR, {"length": 24}, "length must be at least 25"),
        (ShuffledMQAR, {"vocab_size": 19}, "vocab_size must be at least 20"),
        (Copy, {"length": 15}, "length must be at least 16"),
        (Copy, {"vocab_size": 2}, "vocab_size must be at least 3"),
        (Copy, {"vocab_size": 3}, "vocab_size must allow enough"),  # one token: one sequence, so one split is empty
    ],
)
def test_bad_options(kind: type, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(pairs=8, **options)


def test_the_smallest_vocabularies_work() -> None:
    assert ShuffledMQAR(pairs=8, vocab_size=20).batch("test", seed=0, index=0, batch_size=2).labels.max() >= 10
    assert Copy(pairs=8, vocab_size=4).batch("test", seed=0, index=0, batch_size=2).labels.max() <= 3
