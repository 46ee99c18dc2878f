"""Texts of one length out of documents of any length."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..checks import LARGEST_COUNT, check_size, describe_value
from ..kinds import checked

__all__ = ["check_lengths", "text_windows"]


def check_lengths(lengths: Sequence[int], at_least: int, *, name: str = "lengths") -> list[int]:
    """The different lengths in ascending order. ValueError: none, or one below `at_least`. TypeError: no list of integers."""
    if isinstance(lengths, str) or not isinstance(lengths, Sequence):
        raise TypeError(f"{name} must be a list of whole numbers, got {describe_value(lengths)}")
    if not lengths:
        raise ValueError(f"{name} must hold at least one length, got none")
    for length in lengths:
        check_size(name, length, high=LARGEST_COUNT)
        if length < at_least:
            raise ValueError(f"{name} must be at least {at_least} tokens, got {length}")
    return sorted(set(lengths))


@checked
def text_windows(
    documents: Iterable[Sequence[int] | np.ndarray | Tensor],
    length: int,
    *,
    count: int,
    separator: int | None = None,
) -> tuple[Tensor, int]:
    """Up to `count` texts of `length` tokens, int64 [texts, length], and how many of them are joined documents.

    First come the beginnings of documents that are long enough, then cuts of all the others joined in their order, with
    `separator` between them. No further document is looked at once there are `count` long ones.

    Raises:
        ValueError: a document that is not a row of integers, or not one text in all.
    """
    texts: list[np.ndarray] = []
    short: list[np.ndarray] = []
    missing = count * length  # at most so many more tokens are joined: a large corpus is not kept whole
    tokens = 0
    for document in documents:
        row = np.asarray(document)
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"documents must be rows of token ids (integers), got shape {list(row.shape)} of {row.dtype}; "
                "tokenize the text first"
            )
        tokens += row.size
        if row.size >= length:
            texts.append(row[:length].astype(np.int64))
            if len(texts) == count:
                break
        elif row.size and missing > 0:
            short.append(row.astype(np.int64))
            missing -= row.size
            if separator is not None:
                short.append(np.array([separator], dtype=np.int64))
    joined: list[np.ndarray] = []
    if short and len(texts) < count:
        row = np.concatenate(short)
        joined = [row[start : start + length] for start in range(0, row.size - length + 1, length)]
        joined = joined[: count - len(texts)]
    if not texts and not joined:
        raise ValueError(
            f"documents must hold at least {length} tokens, the longest length, got {tokens} in all; "
            "pass more text or shorter lengths"
        )
    return torch.from_numpy(np.stack(texts + joined)), len(joined)
