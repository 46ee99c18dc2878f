"""Is an accuracy better than guessing? Judged by the noise of the test."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["ERRORS", "Standing", "compared_with_chance"]

ERRORS = 3.0  # standard errors: in a table of 24 mixers, a guesser passes for something else once in 15 tables
Standing = Literal["below chance", "at chance", "above chance"]


def compared_with_chance(accuracy: float, chance: float, queries: int) -> Standing:
    """Where an accuracy on `queries` test queries stands, if each is guessed right with probability `chance`: within ERRORS
    standard errors of chance (binomial), or on one side of it."""
    difference = accuracy - chance
    if abs(difference) <= ERRORS * math.sqrt(chance * (1 - chance) / queries):
        return "at chance"
    return "above chance" if difference > 0 else "below chance"
