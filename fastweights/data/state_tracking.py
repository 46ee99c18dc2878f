"""State tracking: word problems of symmetric groups, with the state so far as the label of every token."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import ClassVar

import numpy as np

from ..checks import check_choice, check_size
from ._draws import Draws
from .registry import register_task
from .task import LONGEST, RecallTask

__all__ = ["S3", "S5", "Parity", "StateTracking"]


@dataclass(frozen=True, kw_only=True)
class StateTracking(RecallTask):
    """The word problem of the permutations of some items (`items` is set by subclasses).

    A sequence of permutations g_1 g_2 ... g_n; the label at g_t is the permutation that all up to it result in.

        token at t: g_t        label at t: s_t = g_t s_(t-1), s_0 = identity; (g s)(i) = g(s(i))

    Tokens and labels are the numbers of the permutations in lexicographic order, 0 the identity. `pairs` is n, the
    number of permutations in a sequence, which is its length.

    Options:
    - elements: the permutations that a sequence is drawn from, all equally likely: "all", or "swaps" for the identity
      and the exchanges of two items. The labels are any permutations either way.
    - test_length: permutations in a test sequence, n when None. A longer test asks whether what was learnt continues.

    No test sequence is a training sequence. (Its first tokens may be those of one: there are few short sequences.)

    Sources: Merrill et al. 2024, The Illusion of State in State-Space Models (S5); Grazzi et al. 2025, Unlocking
    State-Tracking in Linear RNNs Through Negative Eigenvalues (parity, S3, swaps, trained on up to 40 and tested on up
    to 256 tokens).
    ValueError: a length other than pairs, a vocabulary smaller than the group.
    """

    elements: str = "all"
    test_length: int | None = None

    items: ClassVar[int]
    unit: ClassVar[str] = "tokens"
    guess: ClassVar[str] = "answering every token with itself"
    by_token: ClassVar[bool] = True

    @property
    def chance(self) -> float:
        """Answering every token with itself, which needs no memory: the first label is the token, each later one any state."""
        length = self.test_length or self.pairs
        return (1 + (length - 1) / len(_group(self.items))) / length

    def shortest_length(self) -> int:
        return self.pairs

    def check_options(self) -> None:
        if self.length != self.pairs:
            raise ValueError(
                f"length must be that of the sequence, {self.pairs} (pairs), for task {self.name!r}, got {self.length}; "
                "leave it out and set pairs"
            )
        check_choice("elements", self.elements, ("all", "swaps"))
        if self.test_length is not None:
            self._set("test_length", check_size("test_length", self.test_length, high=LONGEST))
        needed = len(_group(self.items))
        if self.vocab_size < needed:
            raise ValueError(
                f"vocab_size must be at least {needed}, the states of task {self.name!r}, got {self.vocab_size}; "
                "raise vocab_size"
            )

    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        group, length = _group(self.items), self.pairs if split == "train" else self.test_length or self.pairs
        drawn = np.arange(len(group)) if self.elements == "all" else _swaps(self.items)
        tokens = drawn[draws.below(len(drawn), (rows, length))]
        return np.stack([np.broadcast_to(np.arange(length), tokens.shape), tokens], axis=1)

    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        input_ids, product = associations[:, 1].copy(), _products(self.items)
        labels = input_ids.copy()
        for place in range(1, labels.shape[1]):
            labels[:, place] = product[input_ids[:, place], labels[:, place - 1]]
        return input_ids, labels


@register_task
@dataclass(frozen=True, kw_only=True)
class Parity(StateTracking):
    """Bits; the label is whether the number of ones so far is odd: `StateTracking` of two items."""

    name: ClassVar[str] = "parity"
    summary: ClassVar[str] = "bits; after each, is the number of ones so far odd? (2 states)"
    items: ClassVar[int] = 2


@register_task
@dataclass(frozen=True, kw_only=True)
class S3(StateTracking):
    """`StateTracking` of three items, the smallest group whose elements do not commute."""

    name: ClassVar[str] = "s3"
    summary: ClassVar[str] = "permutations of 3 items; after each, their product so far (6 states)"
    items: ClassVar[int] = 3


@register_task
@dataclass(frozen=True, kw_only=True)
class S5(StateTracking):
    """`StateTracking` of five items, the smallest group of permutations that is not solvable."""

    name: ClassVar[str] = "s5"
    summary: ClassVar[str] = "permutations of 5 items; after each, their product so far (120 states)"
    items: ClassVar[int] = 5


@cache
def _group(items: int) -> np.ndarray:
    """All permutations in lexicographic order, int64 [number, items]."""
    return np.array(list(permutations(range(items))))


@cache
def _swaps(items: int) -> np.ndarray:
    """The numbers of the identity and of the exchanges of two items."""
    moved = (_group(items) != np.arange(items)).sum(axis=1)
    return np.flatnonzero(moved <= 2)


@cache
def _products(items: int) -> np.ndarray:
    """[g, s] holds the number of the permutation i -> g(s(i))."""
    group = _group(items)
    powers = items ** np.arange(items)[::-1]  # a permutation as a number that rises with the lexicographic order
    return np.searchsorted(group @ powers, group[:, group] @ powers)
