"""Log decays g <= 0 computed from the input: one number a head (Mamba-2), or one a key channel (GLA, Kimi Linear)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .initialization import OwnInitialValues
from .norms import at_least_float32

__all__ = ["GLADecay", "HeadDecay", "KimiDecay"]


class SoftplusDecay(OwnInitialValues):
    """g = -exp(A_log) softplus(projection(x) + dt_bias): the discretised decay of Mamba-2, rate A a head.

    First values: A uniform in `rates`, softplus(dt_bias) log-uniform in [1e-3, 1e-1]. Neither wants weight decay, which
    would pull every head to the same rate.
    """

    _no_weight_decay = ("A_log", "dt_bias")

    def __init__(self, num_heads: int, num_steps: int, rates: tuple[float, float]) -> None:
        super().__init__()
        self.rates = rates
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_steps))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        rate = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(*self.rates)
        step = torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        inverse_softplus = step + (-(-step).expm1()).log()
        return {"A_log": rate.clamp_min(1e-4).log(), "dt_bias": inverse_softplus}

    def log_decay(self, step: Tensor) -> Tensor:
        """step [B, T, heads * channels] -> g [B, T, heads, channels], in float32 or better."""
        dt = F.softplus(at_least_float32(step) + at_least_float32(self.dt_bias))
        return -at_least_float32(self.A_log).exp()[:, None] * dt.unflatten(2, (len(self.A_log), -1))


class HeadDecay(SoftplusDecay):
    """One decay a head (Mamba-2, Gated DeltaNet): g [B, T, num_heads]."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(num_heads, num_heads, rates=(0.0, 16.0))
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.log_decay(self.a_proj(x_BTD)).squeeze(3)


class KimiDecay(SoftplusDecay):
    """One decay a key channel (Kimi Linear): g [B, T, num_heads, channels], projected through `channels` dimensions, with
    one rate a head and one dt_bias a channel."""

    def __init__(self, hidden_size: int, num_heads: int, channels: int) -> None:
        super().__init__(num_heads, num_heads * channels, rates=(1.0, 16.0))
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, channels, bias=False), nn.Linear(channels, num_heads * channels, bias=False)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.log_decay(self.f_proj(x_BTD))


class GLADecay(nn.Module):
    """One decay a key channel (gated linear attention, section 4): g = logsigmoid(W2 W1 x + b) / 16, with rank 16.

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
