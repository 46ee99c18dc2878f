"""`gdn-window`: gated DeltaNet whose heads all begin with one window, to measure what a first window does.

The layers of the library spread their windows over the heads. Here one number says all of them, as an unlucky draw could.
Importing this module registers the mixer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.checks import check_number
from fastweights.layers import DeltaNet, register_mixer
from fastweights.layers.decay import HeadDecay
from fastweights.layers.delta_net import DeltaNetOptions
from fastweights.layers.initialization import inverse_softplus
from fastweights.layers.options import option


def above_one(name: str, value: object) -> float:
    return check_number(name, value, above=1)


@dataclass(frozen=True, kw_only=True)
class FirstWindowOptions(DeltaNetOptions):
    """Options of `FirstWindow`, whose docstring explains them."""

    first_window: float = option(16.0, above_one)


class OneWindow(HeadDecay):
    """One decay per head, 1 - 1 / window at first in all of them."""

    def __init__(self, hidden_size: int, num_heads: int, window: float) -> None:
        self.window = window
        super().__init__(hidden_size, num_heads)

    def initial_values(self) -> dict[str, Tensor]:
        step = torch.full_like(self.dt_bias, -math.log1p(-1 / self.window), dtype=torch.float32)
        return {"A_log": torch.zeros_like(step), "dt_bias": inverse_softplus(step)}


class FirstWindow(DeltaNet):
    """Gated DeltaNet with a first window of its own.

    Args:
        first_window: tokens, the first 1 / (1 - decay) of every head.

    The other options are those of `fastweights.layers.DeltaNet`.
    """

    Options = FirstWindowOptions
    options: FirstWindowOptions

    def build(self) -> None:
        super().build()
        self.decay = OneWindow(self.hidden_size, self.heads.value_heads, self.options.first_window)


register_mixer(
    "gdn-window",
    layer=FirstWindow,
    options={"decay": "head"},
    summary="gated DeltaNet that begins with one window in all heads",
    equation="S = a S + beta k (v - a S^T k)^T",
    source="fastweights_studies.measure.block_effects",
)
