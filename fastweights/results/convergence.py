"""Was a run trained long enough? Judged from its loss curve.

The end of a training curve says little as it stands: the learning rate has decayed, and a loss that would keep falling at a
higher rate looks flat. So the loss of the last fifth of training is fitted by a straight line not over the steps but over the
sum of the learning rates so far, which undoes the flattening, and the line is prolonged by as much learning as a fifth of the
whole training had. The run counts as undertrained if that would lower the loss by LEAST_FALL or more, if the slope is
LEAST_ERRORS standard errors from zero, and if the loss has not practically arrived at 0 (CONVERGED).

A learning rate that falls lowers the loss a little by itself, so the mark errs on the side of 'undertrained'. And it can only
see what the curve shows: a model that sits on a plateau before it finds out how to recall is not marked.
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["still_falling"]

PART = 0.2
LEAST_FALL = 0.05  # nats: the right answer would get 5% more probability
LEAST_ERRORS = 2.0
CONVERGED = 0.05  # nats: the right answer has 95% probability


def still_falling(steps: Sequence[int], losses: Sequence[float], learning: Sequence[float]) -> bool:
    """Whether the loss was still falling at the end of training.

    Args:
        steps: optimizer steps at which the points of the loss curve were recorded, ascending.
        losses: mean loss (nats) since the point before.
        learning: sum of the learning rates of all steps up to the point, in any unit.

    Fewer than 5 points in the last fifth are too few to judge: the answer is then no.
    """
    last = np.asarray(steps) > (1 - PART) * steps[-1]
    if last.sum() < 5:
        return False
    x, y = np.asarray(learning, dtype=float)[last], np.asarray(losses, dtype=float)[last]
    slope, height = np.polyfit(x - x[-1], y, 1)
    noise = np.sqrt(np.sum((y - slope * (x - x[-1]) - height) ** 2) / (len(y) - 2))
    error = noise / np.sqrt(np.sum((x - x.mean()) ** 2))
    fall = -slope * PART * learning[-1]
    return bool(height > CONVERGED and fall > LEAST_FALL and -slope > LEAST_ERRORS * error)
