"""Selective copying, re-derived from the tokens alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.data import IGNORE_INDEX, SelectiveCopy

PADDING, SEPARATOR = 0, 1


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    pairs=st.integers(1, 12),
    extra=st.integers(0, 40),
    room=st.integers(0, 300),
    split=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_labels_are_the_tokens_that_are_no_padding(
    pairs: int, extra: int, room: int, split: str, seed: int
) -> None:
    task = SelectiveCopy(pairs=pairs, length=2 * pairs + extra, vocab_size=40 + room)
    for tokens, labels in zip(*(x.tolist() for x in task.batch(split, seed=seed, index=3, batch_size=4)), strict=True):
        context = tokens[: pairs + extra]
        content = [token for token in context if token != PADDING]
        assert len(content) == pairs and set(content) <= set(range(2, task.vocab_size))
        assert tokens[pairs + extra :] == [SEPARATOR] * pairs
        assert labels == [IGNORE_INDEX] * (pairs + extra) + content


def test_all_choices_of_places_are_equally_likely() -> None:
    tokens = (
        SelectiveCopy(pairs=2, length=6, vocab_size=50).batch("train", seed=0, index=0, batch_size=12_000).input_ids
    )
    places, counts = np.unique((tokens[:, :4] > 1).int().numpy(), axis=0, return_counts=True)
    assert len(places) == 6
    np.testing.assert_allclose(counts / 12_000, 1 / 6, atol=0.013)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 15}, "length must be at least 16"),
        ({"vocab_size": 2}, "vocab_size must be at least 3"),
        ({"vocab_size": 3}, "vocab_size must allow enough"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectiveCopy(pairs=8, **options)
