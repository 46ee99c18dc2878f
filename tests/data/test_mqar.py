"""MQAR: the rules of the Zoology benchmark, re-derived from the tokens alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.data import IGNORE_INDEX, MQAR, OutOfDistributionMQAR


def check_sequence(tokens: list[int], labels: list[int], task: MQAR, keys: range) -> list[int]:
    """Asserts that one sequence keeps the rules; returns the gap of each pair, in the context's order."""
    context = 2 * task.pairs
    shown_keys, shown_values = tokens[0:context:2], tokens[1:context:2]
    assert len(set(shown_keys)) == task.pairs and set(shown_keys) <= set(keys)
    assert len(set(shown_values)) == task.pairs
    assert set(shown_values) <= set(range(task.vocab_size // 2, task.vocab_size))
    assert all(0 <= token < task.vocab_size for token in tokens)

    value_of = dict(zip(shown_keys, shown_values, strict=True))
    queries = [position for position, label in enumerate(labels) if label != IGNORE_INDEX]
    assert all(position >= context and (position - context) % 2 == 0 for position in queries)
    assert sorted(tokens[position] for position in queries) == sorted(shown_keys)
    for position in queries:
        assert labels[position] == value_of[tokens[position]]
    if not task.random_non_queries:
        assert all(tokens[position] == 0 for position in range(context, task.length) if position not in queries)
    place = {tokens[position]: position for position in queries}
    return [(place[key] - context) // 2 for key in shown_keys]


@st.composite
def mqar_tasks(draw: st.DrawFn) -> MQAR:
    pairs = draw(st.integers(1, 8))
    return MQAR(
        pairs=pairs,
        length=4 * pairs + draw(st.integers(0, 9)),
        vocab_size=2 * pairs + 12 + draw(st.integers(0, 300)),
        power_a=draw(st.sampled_from([0.01, 0.5, 1.0, 2.0])),
        random_non_queries=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    task=mqar_tasks(),
    split=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 2**63 - 1),
    index=st.integers(0, 2**63 - 1),
    batch_size=st.integers(1, 6),
)
def test_every_label_follows_from_the_tokens(task: MQAR, split: str, seed: int, index: int, batch_size: int) -> None:
    input_ids, labels = task.batch(split, seed=seed, index=index, batch_size=batch_size)
    assert input_ids.shape == labels.shape == (batch_size, task.length)
    for tokens, row_labels in zip(input_ids.tolist(), labels.tolist(), strict=True):
        check_sequence(tokens, row_labels, task, range(1, task.vocab_size // 2))


def test_all_keys_values_and_gaps_are_used_when_the_task_is_as_large_as_it_can_be() -> None:
    task = MQAR(pairs=31, length=124, vocab_size=64)
    input_ids, labels = task.batch("train", seed=0, index=0, batch_size=4)
    for tokens, row_labels in zip(input_ids.tolist(), labels.tolist(), strict=True):
        assert sorted(check_sequence(tokens, row_labels, task, range(1, 32))) == list(range(31))


def test_gaps_follow_the_power_law_one_after_the_other() -> None:
    task = MQAR(pairs=2, length=24, vocab_size=64, power_a=0.01)  # 10 gaps
    batch = task.batch("train", seed=3, index=0, batch_size=20_000)
    gaps = np.array(
        [
            check_sequence(tokens, labels, task, range(1, 32))
            for tokens, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)
        ]
    )
    weight = np.arange(1, 11) ** (0.01 - 1)
    first = weight / weight.sum()
    # P(second = j) = sum over i != j of P(first = i) weight_j / (total - weight_i)
    second = np.array([sum(first[i] * first[j] / (1 - first[i]) for i in range(10) if i != j) for j in range(10)])
    for drawn, expected in ((gaps[:, 0], first), (gaps[:, 1], second)):
        share = np.bincount(drawn, minlength=10) / len(drawn)
        np.testing.assert_allclose(share, expected, atol=0.012)  # 3.5 standard errors of the largest
    assert abs(first - second).max() > 0.05  # the two differ


def test_power_one_is_uniform() -> None:
    task = MQAR(pairs=1, length=22, vocab_size=64, power_a=1)  # 10 gaps
    labels = task.batch("train", seed=3, index=0, batch_size=20_000).labels
    share = np.bincount(((labels != IGNORE_INDEX).int().argmax(1) - 2) // 2, minlength=10) / len(labels)
    np.testing.assert_allclose(share, 0.1, atol=0.0075)


def test_filler_is_uniform_over_the_whole_vocabulary() -> None:
    task = MQAR(pairs=1, length=4, vocab_size=10)  # tokens: k v k filler
    filler = task.batch("train", seed=0, index=0, batch_size=20_000).input_ids[:, 3]
    np.testing.assert_allclose(np.bincount(filler, minlength=10) / len(filler), 0.1, atol=0.0075)


@pytest.mark.parametrize("split", ["train", "test"])
def test_out_of_distribution_keys(split: str) -> None:
    task = OutOfDistributionMQAR(pairs=3, vocab_size=42, length=40, held_out_keys=0.25)  # keys 1..20
    keys = {"train": range(1, 16), "test": range(16, 21)}
    input_ids, labels = task.batch(split, seed=0, index=0, batch_size=500)
    for tokens, row_labels in zip(input_ids.tolist(), labels.tolist(), strict=True):
        check_sequence(tokens, row_labels, task, keys[split])
    assert set(input_ids[:, 0:6:2].unique().tolist()) == set(keys[split])  # every one of them is used
    asked = labels != IGNORE_INDEX
    assert set(input_ids[asked].tolist()) <= set(keys[split])
    assert set(keys["test"]) <= set(input_ids[:, 6:][~asked[:, 6:]].tolist())  # held-out keys occur as filler


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"length": 31}, "length must be at least 32"),
        (ValueError, {"vocab_size": 17}, "vocab_size must be at least 18"),
        (ValueError, {"power_a": 0}, "power_a"),
        (ValueError, {"power_a": -0.5}, "power_a"),
        (ValueError, {"power_a": float("nan")}, "power_a"),
        (ValueError, {"power_a": float("inf")}, "power_a"),
        (TypeError, {"power_a": True}, "power_a"),
        (TypeError, {"power_a": "0.01"}, "power_a"),
        (TypeError, {"random_non_queries": 1}, "random_non_queries"),
    ],
)
@pytest.mark.parametrize("kind", [MQAR, OutOfDistributionMQAR])
def test_bad_options(kind: type[MQAR], error: type[Exception], options: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        kind(pairs=8, **options)


def test_the_smallest_vocabulary_and_length_work() -> None:
    batch = MQAR(pairs=8, vocab_size=18, length=32).batch("test", seed=0, index=0, batch_size=2)
    assert batch.input_ids.shape == (2, 32)


def test_a_vocabulary_smaller_than_the_length_works() -> None:
    assert MQAR(pairs=2, vocab_size=12, length=100).batch("train", seed=0, index=0, batch_size=1).labels.max() >= 6


@pytest.mark.parametrize(
    "error, share",
    [
        (ValueError, 0),
        (ValueError, 1),
        (ValueError, -0.1),
        (ValueError, float("nan")),
        (TypeError, True),
        (ValueError, 0.95),
    ],
)
def test_bad_share_of_held_out_keys(error: type[Exception], share: float) -> None:
    with pytest.raises(error, match="held_out_keys"):
        OutOfDistributionMQAR(pairs=4, vocab_size=64, held_out_keys=share)


def test_held_out_keys_need_filler() -> None:
    with pytest.raises(ValueError, match="random_non_queries must be True"):
        OutOfDistributionMQAR(pairs=4, random_non_queries=False)
