"""Kinds of entries in long lists."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from fastweights import kinds


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        ([1] * 9 + ["a"], Sequence[int], False),
        ([True, *range(9)], list[int], False),
        ([2.5, 1], list[float], True),
        ([[1, 2], [3, "a"]], Iterable[list[int]], False),
        ([[1, 2], torch.ones(2)], Iterable[list[int] | torch.Tensor], True),
    ],
)
def test_every_entry_counts(value: object, hint: Any, fits: bool) -> None:
    assert kinds.is_kind(value, hint) == fits


def test_many_tokens_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions take documents as lists of millions."""
    looked_at, is_kind = [], kinds.is_kind

    def counted(value: object, hint: Any) -> bool:
        looked_at.append(value)
        return is_kind(value, hint)

    monkeypatch.setattr(kinds, "is_kind", counted)
    documents = [list(range(1000)) for _ in range(10)]
    assert counted(documents, Iterable[Sequence[int]]) and len(looked_at) < 100
