"""Numbers a head computed from the input: the gain of a write, and the decay and gain of a preconditioner."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .decay import HeadDecay
from .norms import at_least_float32

__all__ = ["PreconditionerGates", "SigmoidGain"]


class SigmoidGain(nn.Module):
    """beta = largest * sigmoid(b_proj x), [B, T, num_heads] in float32 or better."""

    def __init__(self, hidden_size: int, num_heads: int, largest: float = 1.0) -> None:
        super().__init__()
        self.largest = largest
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.largest * torch.sigmoid(at_least_float32(self.b_proj(x_BTD)))


class PreconditionerGates(nn.Module):
    """Decay and gain of the running key energy A: projections of their own (Preconditioned DeltaNet, section 4.2), or, when
    `tied`, those of the memory (appendix E.3 finds this worse)."""

    def __init__(self, hidden_size: int, num_heads: int, tied: bool) -> None:
        super().__init__()
        self.tied = tied
        if not tied:
            self.decay = HeadDecay(hidden_size, num_heads)
            self.gain = SigmoidGain(hidden_size, num_heads)

    def forward(self, x_BTD: Tensor, g_BTG: Tensor | None, beta_BTG: Tensor) -> tuple[Tensor, Tensor]:
        """g, beta [B, T, num_heads] of A, given the memory's (g None: no decay)."""
        if not self.tied:
            return self.decay(x_BTD), self.gain(x_BTD)
        return torch.zeros_like(beta_BTG) if g_BTG is None else g_BTG, beta_BTG
