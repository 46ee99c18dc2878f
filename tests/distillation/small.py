"""Rows of text, and a student with memories of a small teacher."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastweights.data.text.packing import Row
from fastweights.models import HybridModel, linearize

from ..evaluation.other_models import llama

LENGTH = 24


def rows(count: int = 4) -> list[Row]:
    """Of one, two or three documents each."""
    draws = np.random.default_rng(0)
    starts = [np.array([0, 7, 8][: 1 + row % 3]) for row in range(count)]
    return [(draws.integers(400, size=LENGTH), begun) for begun in starts]


def pair(**options: Any) -> tuple[HybridModel, Any]:
    """A student without attention, and its teacher."""
    teacher = llama(num_hidden_layers=3)
    return linearize(teacher, to="gdn", **options), teacher
