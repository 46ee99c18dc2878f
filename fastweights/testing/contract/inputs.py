"""Changes of the inputs of a case, and the extreme values that they may take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..cases import OpInputs


def with_tokens(inputs: OpInputs, **tokens: Tensor) -> OpInputs:
    return OpInputs({**inputs.tokens, **tokens}, inputs.parameters, inputs.options)


KEYS = ("key", "positive key")
EXTREMES = {
    "zero keys": lambda kind, x: torch.zeros_like(x) if kind in KEYS else x,
    "one key": lambda kind, x: x[:, :1].expand_as(x) if kind in KEYS else x,
    "decay 0": lambda kind, x: torch.full_like(x, -math.inf) if "decay" in kind else x,
    "some decay 0": lambda kind, x: torch.where(x < x.median(), -math.inf, x) if "decay" in kind else x,
    "strong decay": lambda kind, x: 100 * x if "decay" in kind else x,
    "decay 1": lambda kind, x: torch.zeros_like(x) if "decay" in kind else x,
    "gain 0": lambda kind, x: torch.zeros_like(x) if "gate" in kind else x,
    "gain 1": lambda kind, x: torch.ones_like(x) if "gate" in kind else x,
}
