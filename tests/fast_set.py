"""Which parameters of a test are in the fast set; the others have the mark `slow`, and `make test-slow` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

__all__ = ["fast_where", "slow"]


def slow(*values: Any) -> list[Any]:
    """For a list of parameters: `[1, *slow(2, 3)]` has 1 in the fast set."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def fast_where(chosen: Callable[[Mapping[str, Any]], bool]) -> pytest.MarkDecorator:
    """Of all combinations of a test's parameters, given by their names, the chosen ones are in the fast set."""
    return pytest.mark.fast_where.with_args(chosen)
