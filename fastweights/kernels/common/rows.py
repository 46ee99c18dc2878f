"""The rows of a pool that sequences have. Nothing of triton is imported here."""

from __future__ import annotations

from torch import Tensor


def rows_per_sequence(rows: Tensor | None) -> int:
    """1, or 1 + S of rows [N, 1 + S], where the state after each token has a row of its own."""
    return 1 if rows is None or rows.ndim == 1 else rows.shape[1]
