"""Gains computed from the input: of a write, of a gradient step, of an importance, and of a preconditioner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.authoring import exp_rate, linear_rows
from .decay import HeadDecay
from .initialization import OwnInitialValues, UniformLinear
from .norms import at_least_float32
from .shared_input import ProjectedGate, joins

__all__ = ["ImportanceGain", "PreconditionerGates", "SigmoidGain", "StepSize"]


class SigmoidGain(ProjectedGate):
    """beta = largest * sigmoid(b_proj x), [B, T, num_heads] in float32 or better. A bias is zero at first."""

    def __init__(self, hidden_size: int, num_heads: int, largest: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.largest = largest
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=bias)
        if bias:
            nn.init.zeros_(self.b_proj.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if joins(x_BTD, self.b_proj):
            (beta,) = linear_rows(
                x_BTD, self.b_proj.weight, kind="sigmoid", bias=self.b_proj.bias, largest=self.largest
            )
            return beta
        return self.finish(self.b_proj(x_BTD))

    @property
    def projection(self) -> nn.Module:
        return self.b_proj

    def finish(self, y: Tensor) -> Tensor:
        return self.largest * torch.sigmoid(at_least_float32(y))


class StepSize(OwnInitialValues, ProjectedGate):
    """gamma = rate * sigmoid(b_proj x), [B, T, num_heads] in float32 or better, with one learned positive rate per head."""

    _no_weight_decay = ("log_rate",)

    def __init__(self, hidden_size: int, num_heads: int, rate: float) -> None:
        super().__init__()
        self.first_rate = rate
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.gate = SigmoidGain(hidden_size, num_heads)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"log_rate": torch.full_like(self.log_rate, math.log(self.first_rate))}

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._scaled(self.gate(x_BTD))

    @property
    def projection(self) -> nn.Module:
        return self.gate.b_proj

    def finish(self, y: Tensor) -> Tensor:
        return self._scaled(self.gate.finish(y))

    def _scaled(self, gain_BTG: Tensor) -> Tensor:
        return exp_rate(self.log_rate) * gain_BTG


class ImportanceGain(OwnInitialValues):
    """z = W2 W1 x [B, T, num_heads, channels] and c = softplus(b_scale) s [B, T, num_heads]: a token of step s adds
    c sigmoid(z) to the importance of what it writes (Palimpsa, section 2.4). W1 has rank hidden_size / 16; b_scale, one number
    per head, sets how far the memory is from one without metaplasticity (b_scale = -inf)."""

    _no_weight_decay = ("b_scale",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        channels: int,
        b_scale: float | Sequence[float],
        first_beta: str = "normal",
    ) -> None:
        super().__init__()
        self.first_b_scale = b_scale
        rank = max(1, hidden_size // 16)
        self.b_scale = nn.Parameter(torch.empty(num_heads))
        second = UniformLinear if first_beta == "uniform" else partial(nn.Linear, bias=False)
        self.beta_proj = nn.Sequential(nn.Linear(hidden_size, rank, bias=False), second(rank, num_heads * channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        if isinstance(self.first_b_scale, Sequence):
            return {"b_scale": torch.empty_like(self.b_scale, dtype=torch.float32).uniform_(*self.first_b_scale)}
        return {"b_scale": torch.full_like(self.b_scale, self.first_b_scale)}

    def forward(self, x_BTD: Tensor, s_BTG: Tensor) -> tuple[Tensor, Tensor]:
        z_BTGV = self.beta_proj(x_BTD).unflatten(2, (len(self.b_scale), -1))
        return z_BTGV, F.softplus(at_least_float32(self.b_scale)) * s_BTG


class PreconditionerGates(nn.Module):
    """Decay and gain of the running key energy A: projections of their own (Preconditioned DeltaNet, section 4.2), or, when
    `tied`, those of the memory (appendix E.3 finds this worse)."""

    def __init__(self, hidden_size: int, num_heads: int, tied: bool) -> None:
        super().__init__()
        self.tied = tied
        if not tied:
            self.decay = HeadDecay(hidden_size, num_heads)
            self.gain = SigmoidGain(hidden_size, num_heads)

    @property
    def own(self) -> tuple[nn.Module, ...]:
        """The gates of decay and gain, where they are not tied."""
        return () if self.tied else (self.decay, self.gain)

    def forward(self, own: Sequence[Tensor], g_BTG: Tensor | None, beta_BTG: Tensor | None) -> tuple[Tensor, Tensor]:
        """g, beta [B, T, num_heads] of A: what its own gates gave, or, where they are tied, the memory's (g None: no decay)."""
        if not self.tied:
            g, beta = own
            return g, beta
        assert beta_BTG is not None
        return torch.zeros_like(beta_BTG) if g_BTG is None else g_BTG, beta_BTG
