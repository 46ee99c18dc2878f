"""Log decays of key channels from projected steps, for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..framework.node import KernelRule, Node, Tensors

__all__ = ["channel_decay"]


class ChannelDecay(KernelRule):
    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        step = tensors[0]
        assert step is not None
        return (step.new_empty(step.shape, dtype=torch.float32),), ()


NODE = Node(
    "channel_decay", {"step": False, "bias": False, "rate": False}, {}, outputs=1, rule=ChannelDecay("channel_decay")
)


def channel_decay(step: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    r"""$$g = -A\, \mathrm{softplus}(f + b)$$ by the kernels, one pass each way; nothing is checked.

    Args:
        step: f, [..., V], V up to 4096, not in float64.
        bias, rate: b and A, [V], float32.

    Returns:
        g [..., V] in float32.
    """
    return NODE((step, bias, rate), ())[0]
