"""Random inputs of the experiments, in float64 unless said, drawn on the CPU so that every device gets the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Draws", "penalty_stream"]


class Draws:
    """Seeded draws."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (low + (high - low) * drawn).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def unit(self, *shape: int) -> Tensor:
        """Directions in the last dimension."""
        return F.normalize(self.normal(*shape), dim=-1)


def penalty_stream(draws: Draws, length: int, channels: int, heads: int = 1) -> tuple[Tensor, Tensor]:
    """Keys ELU(x) + 1 of normal x, and the penalty directions unit(W x) of length 1 with a random W per head, as the layer of
    variational linear attention forms them: both [1, T, H, K]."""
    raw = draws.normal(1, length, heads, channels)
    weight = draws.normal(heads, channels, channels)
    direction = torch.einsum("bthk,hkj->bthj", raw, weight)
    return F.elu(raw) + 1, F.normalize(direction, dim=-1)
