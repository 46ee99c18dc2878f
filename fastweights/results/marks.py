"""Marks of a result: was the run trained long enough, and is its accuracy better than guessing?

The first is judged from the loss curve. Its end says little as it stands: the learning rate has decayed, and a loss that would
keep falling at a higher rate looks flat. So the loss of the last fifth of training is fitted by a straight line not over the
steps but over the sum of the learning rates so far, which undoes the flattening, and the line is prolonged by as much learning
as a fifth of the whole training had. What it falls by then is known up to its standard error.

- The loss is still falling if that fall is LEAST_FALL or more and LEAST_ERRORS standard errors from zero.
- The curve is too short to tell if it has fewer than FEWEST_STEPS steps or FEWEST_POINTS points in its last fifth, or if a fall
  of LARGEST_UNSEEN lies within LEAST_ERRORS standard errors of the one found.
- Neither counts where the loss has practically arrived at 0 (CONVERGED).

A learning rate that falls lowers the loss a little by itself, so the mark errs on the side of 'undertrained'. And it can only
see what the curve shows: a model that sits on a plateau before it finds out how to recall is not marked.

The second is judged by the noise of the test.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..kinds import checked

__all__ = ["Standing", "compared_with_chance", "still_falling", "undertrained"]

PART = 0.2
FEWEST_STEPS = 100
FEWEST_POINTS = 10
LEAST_FALL = 0.05  # nats: the right answer would get 5% more probability
LARGEST_UNSEEN = 0.2  # nats: 22% more
LEAST_ERRORS = 2.0
CONVERGED = 0.05  # nats: the right answer has 95% probability
CHANCE_ERRORS = 3.0  # standard errors: in a table of 24 mixers, a guesser passes for something else once in 15 tables
Standing = Literal["below chance", "at chance", "above chance"]


@checked
def undertrained(steps: Sequence[int], losses: Sequence[float], learning: Sequence[float]) -> bool:
    """Whether the loss was still falling at the end of training, or the curve is too short to tell.

    Args:
        steps: optimizer steps at which the points of the loss curve were recorded, ascending.
        losses: mean loss (nats) since the point before.
        learning: sum of the learning rates of all steps up to the point, in any unit.
    """
    _check_curve(steps, losses, learning)
    if not len(steps):
        return True
    last = np.asarray(steps) > (1 - PART) * steps[-1]
    if np.asarray(losses)[last].mean() <= CONVERGED:
        return False
    if steps[-1] < FEWEST_STEPS or last.sum() < FEWEST_POINTS:
        return True
    level, fall, error = _extrapolate(steps, losses, learning)
    return level > CONVERGED and (_falls(fall, error) or fall + LEAST_ERRORS * error > LARGEST_UNSEEN)


@checked
def still_falling(steps: Sequence[int], losses: Sequence[float], learning: Sequence[float]) -> bool:
    """Whether the loss was still falling at the end of training; no where fewer than 5 points are in its last fifth. Arguments
    as for `undertrained`."""
    _check_curve(steps, losses, learning)
    if not len(steps) or (np.asarray(steps) > (1 - PART) * steps[-1]).sum() < 5:
        return False
    level, fall, error = _extrapolate(steps, losses, learning)
    return level > CONVERGED and _falls(fall, error)


def _check_curve(steps: Sequence[int], losses: Sequence[float], learning: Sequence[float]) -> None:
    for name, values in (("losses", losses), ("learning", learning)):
        if len(values) != len(steps):
            raise ValueError(f"{name} must have one number per entry of steps, {len(steps)}, got {len(values)}")


def _falls(fall: float, error: float) -> bool:
    return fall > LEAST_FALL and fall > LEAST_ERRORS * error


def _extrapolate(
    steps: Sequence[int], losses: Sequence[float], learning: Sequence[float]
) -> tuple[float, float, float]:
    """The loss at the end, its fall over another fifth of the learning, and the standard error of the fall."""
    last = np.asarray(steps) > (1 - PART) * steps[-1]
    x, y = np.asarray(learning, dtype=float)[last], np.asarray(losses, dtype=float)[last]
    slope, level = np.polyfit(x - x[-1], y, 1)
    noise = np.sqrt(np.sum((y - slope * (x - x[-1]) - level) ** 2) / (len(y) - 2))
    error = noise / np.sqrt(np.sum((x - x.mean()) ** 2))
    more = PART * learning[-1]
    return float(level), float(-slope * more), float(error * more)


def compared_with_chance(accuracy: float, chance: float, queries: int) -> Standing:
    """Where an accuracy on `queries` test queries stands, if each is guessed right with probability `chance`: within
    CHANCE_ERRORS standard errors of chance (binomial), or on one side of it."""
    difference = accuracy - chance
    if abs(difference) <= CHANCE_ERRORS * math.sqrt(chance * (1 - chance) / queries):
        return "at chance"
    return "above chance" if difference > 0 else "below chance"
