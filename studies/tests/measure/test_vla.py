"""The loop that variational linear attention is timed beside computes the same memory."""

from __future__ import annotations

import torch
from fastweights_studies.measure import vla


def test_the_loop_is_the_op() -> None:
    tokens = vla.draw(45, "cpu", torch.float64)
    difference = vla.by_tokens(**tokens) - vla.memory(tokens, vla.PERIOD)
    assert difference.abs().max() < 1e-4
