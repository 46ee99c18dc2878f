"""The split of an example: a fixed function of the example, so no two splits share one."""

from collections.abc import Callable

import numpy as np

__all__ = ["SPLITS", "check_split", "draw_split", "is_test"]

SPLITS = ("train", "test")
TEST_ONE_IN = 4  # share of all possible examples that are test examples
_WITNESS_ROUNDS = 32
_WITNESS_ROWS = 64


def is_test(associations: np.ndarray) -> np.ndarray:
    """True where the set of associations hashes into the test bucket; [rows, 2, pairs] -> bool [rows].

    The hash is the sum over the associations (a, b) of mix(a, b): it does not depend on their order, on the seed or
    on the task's length and vocabulary.
    """
    first, second = associations[:, 0].astype(np.uint64), associations[:, 1].astype(np.uint64)
    total = _mix((first << np.uint64(32)) ^ second).sum(axis=1, dtype=np.uint64)
    return _mix(total) % np.uint64(TEST_ONE_IN) == 0


def draw_split(draw: Callable[[int], np.ndarray], split: str, rows: int) -> np.ndarray:
    """`rows` examples of `split` from `draw(n) -> [n, 2, pairs]`: drawn until enough of them belong to it.

    Each is an independent draw conditioned on its split. Terminates because `check_split` has seen one.
    """
    share = TEST_ONE_IN if split == "test" else TEST_ONE_IN / (TEST_ONE_IN - 1)
    kept: list[np.ndarray] = []
    missing = rows
    while missing > 0:
        drawn = draw(int(missing * share * 1.25) + 4)  # a quarter more than expected: a second round is rare
        kept.append(drawn[is_test(drawn) == (split == "test")][:missing])
        missing -= len(kept[-1])
    return np.concatenate(kept)


def check_split(draw: Callable[[int], np.ndarray], split: str) -> None:
    """ValueError when none of 2,048 examples from `draw` belongs to `split`.

    With hundreds of possible examples or more this cannot happen in practice; with a handful the split may be empty.
    """
    for _ in range(_WITNESS_ROUNDS):
        if (is_test(draw(_WITNESS_ROWS)) == (split == "test")).any():
            return
    raise ValueError(
        "vocab_size must allow enough different examples for both splits, got a task without a single "
        f"{split} example; raise vocab_size"
    )


def _mix(words: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words that spreads every bit over all bits (the finaliser of SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
