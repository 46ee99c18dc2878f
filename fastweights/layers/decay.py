"""Log decays g <= 0 computed from the input: one per head (Mamba-2) or one per key channel (GLA, Kimi Linear)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .initialization import OwnInitialValues, inverse_softplus
from .norms import at_least_float32

__all__ = ["GLADecay", "HeadDecay", "KimiDecay", "StepDecay"]


class SoftplusDecay(OwnInitialValues):
    """g = -exp(A_log) softplus(projection(x) + dt_bias): the discretised decay of Mamba-2, one rate A per head.

    First values: A uniform in `rates`, softplus(dt_bias) log-uniform in [1e-3, 1e-1]; with `long_memory` A from 0.01 to 0.16
    and dt from 1e-3 to 1e-1 in even (logarithmic) steps over the heads. Weight decay would pull every head to the same rate,
    so neither parameter has any.
    """

    _no_weight_decay = ("A_log", "dt_bias")

    def __init__(
        self, num_heads: int, num_steps: int, rates: tuple[float, float] = (0.0, 16.0), long_memory: bool = False
    ) -> None:
        super().__init__()
        self.rates = rates
        self.long_memory = long_memory
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_steps))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        rate = torch.empty_like(self.A_log, dtype=torch.float32)
        step = torch.empty_like(self.dt_bias, dtype=torch.float32)
        if self.long_memory:
            rate = torch.linspace(0.01, 0.16, len(rate), device=rate.device)
            step = torch.logspace(-3, -1, len(step), device=step.device)
        else:
            rate = rate.uniform_(*self.rates)
            step = step.uniform_(math.log(1e-3), math.log(1e-1)).exp()
        return {"A_log": rate.clamp_min(1e-4).log(), "dt_bias": inverse_softplus(step)}

    def step_size(self, step: Tensor) -> Tensor:
        """dt = softplus(step + dt_bias), in float32 or better."""
        return F.softplus(at_least_float32(step) + at_least_float32(self.dt_bias))

    def log_decay(self, dt: Tensor) -> Tensor:
        """dt [B, T, heads * channels] -> g [B, T, heads, channels]."""
        return -at_least_float32(self.A_log).exp()[:, None] * dt.unflatten(2, (len(self.A_log), -1))


class HeadDecay(SoftplusDecay):
    """One decay per head (Mamba-2, Gated DeltaNet): g [B, T, num_heads]."""

    def __init__(self, hidden_size: int, num_heads: int, long_memory: bool = False) -> None:
        super().__init__(num_heads, num_heads, long_memory=long_memory)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.log_decay(self.step_size(self.a_proj(x_BTD))).squeeze(3)


class StepDecay(SoftplusDecay):
    """Step size dt, kept within limits, and decay of Mamba-2 from steps [B, T, num_heads] that the layer has projected."""

    def __init__(self, num_heads: int, smallest: float, largest: float | None, long_memory: bool) -> None:
        super().__init__(num_heads, num_heads, long_memory=long_memory)
        self.limits = smallest, largest

    def forward(self, step_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """dt, g [B, T, num_heads]"""
        dt_BTH = self.step_size(step_BTH).clamp(*self.limits)
        return dt_BTH, self.log_decay(dt_BTH).squeeze(3)


class KimiDecay(SoftplusDecay):
    """One decay per key channel (Kimi Linear): g [B, T, num_heads, channels], projected through `channels` dimensions, with
    one rate per head and one dt_bias per channel."""

    def __init__(self, hidden_size: int, num_heads: int, channels: int) -> None:
        super().__init__(num_heads, num_heads * channels, rates=(1.0, 16.0))
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, channels, bias=False), nn.Linear(channels, num_heads * channels, bias=False)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.log_decay(self.step_size(self.f_proj(x_BTD)))


class GLADecay(nn.Module):
    """One decay per key channel (gated linear attention, section 4): g = logsigmoid(W2 W1 x + b) / 16, with rank 16.

    The divisor keeps the first decays near 1, so that memory is long before training shortens it.
    """

    def __init__(self, hidden_size: int, num_heads: int, channels: int, rank: int = 16, divisor: float = 16.0) -> None:
        super().__init__()
        self.channels = channels
        self.divisor = divisor
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, num_heads * channels, bias=True)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        g = F.logsigmoid(at_least_float32(self.gk_proj(x_BTD))) / self.divisor
        return g.unflatten(2, (-1, self.channels))
