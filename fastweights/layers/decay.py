"""Log decays g <= 0 computed from the input: one per head (Mamba-2) or one per key channel (GLA, Kimi Linear)."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.availability import takes_rows
from ..ops.authoring import LARGEST_LOG_RATE, Product, channel_decay, exp_rate, step_decay, takes_step_decay
from .initialization import OwnInitialMatrices, OwnInitialValues, inverse_softplus
from .norms import at_least_float32
from .parts import HeadPart
from .shared_input import (
    InputProducts,
    ProjectedGate,
    find_first_part,
    is_plain,
    joins,
    multiply,
    plain_products,
    project,
    trains_on_gpu,
)

__all__ = ["FIRST_DECAYS", "RAMPS", "FixedDecay", "ForgetGate", "GLADecay", "HeadDecay", "KimiDecay", "StepDecay"]

RATES = (0.0, 16.0)  # between which the first A are drawn
# Powers of ten that the first dt goes through from the first head to the last. A goes from 0.01 to 0.16 with the first two, and
# is drawn at random with "steps". Palimpsa's appendix has "paper" for recall and "steps" for language models; the authors'
# released code has "release".
RAMPS = {"paper": (-3.0, -1.0), "release": (-1.0, -3.0), "steps": (-3.0, -1.0)}
WINDOWS = (4.0, 12.0)  # powers of two that the first windows 1 / (1 - decay) go through with "windows"
FIRST_DECAYS = (*RAMPS, "windows", "own")


def make_ramps(
    name: str, num_heads: int, rates: tuple[float, float], device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """First A and dt [num_heads] of the ramp that `name` names. rates: the interval from which random A are drawn."""
    if name == "windows":
        middle = torch.tensor([sum(WINDOWS) / 2], device=device)  # of one head
        window = torch.exp2(torch.linspace(*WINDOWS, num_heads, device=device) if num_heads > 1 else middle)
        return torch.ones_like(window), -torch.log1p(-1 / window)
    first, last = RAMPS[name]
    rate = torch.linspace(0.01, 0.16, num_heads, device=device)
    if name == "steps":
        rate = torch.empty_like(rate).uniform_(*rates).clamp_min(1e-4)
    return rate, torch.logspace(first, last, num_heads, device=device)


class SoftplusDecay(OwnInitialValues):
    """g = -exp(A_log) softplus(projection(x) + dt_bias): the discretised decay of Mamba-2, one rate A per head.

    exp(A_log) or its gradient could overflow where A_log is above `LARGEST_LOG_RATE`. What exceeds this bound is then added to
    the argument of softplus instead. The decay stays the same: it is zero unless that argument is so low that softplus is the
    exponential function.

    First values: A and dt = softplus(dt_bias) of the ramp that `long_memory` names, None for "windows". With "own", as Mamba-2
    has them: A uniform in `rates`, and dt log-uniform in `steps`. Neither parameter has weight decay, which would pull all heads
    to one rate.
    """

    _no_weight_decay = ("A_log", "dt_bias")

    def __init__(
        self, num_heads: int, num_steps: int, rates: tuple[float, float] = RATES, long_memory: str | None = None
    ) -> None:
        super().__init__()
        self.rates = rates
        self.steps = (1e-3, 1e-1)
        self.long_memory = long_memory or "windows"
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_steps))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        rate = torch.empty_like(self.A_log, dtype=torch.float32)
        step = torch.empty_like(self.dt_bias, dtype=torch.float32)
        if self.long_memory == "own":
            rate = rate.uniform_(*self.rates)
            step = step.uniform_(*(math.log(limit) for limit in self.steps)).exp()
        else:
            rate, steps = make_ramps(self.long_memory, len(rate), self.rates, rate.device)
            step = steps.repeat_interleave(len(step) // len(rate))  # channels of a head start alike
        return {"A_log": rate.clamp_min(1e-4).log(), "dt_bias": inverse_softplus(step)}

    def step_size(self, step: Tensor) -> Tensor:
        """dt = softplus(step + dt_bias), in float32 or better."""
        return F.softplus(at_least_float32(step) + at_least_float32(self.dt_bias))

    def log_decay(self, dt: Tensor) -> Tensor:
        """dt [B, T, heads * channels] -> g [B, T, heads, channels]."""
        return -exp_rate(self.A_log)[:, None] * dt.unflatten(2, (len(self.A_log), -1))

    def compute_decay(self, x_BTD: Tensor, projection: nn.Module) -> Tensor:
        """g [B, T, heads, channels] of steps that the projection makes of x."""
        if joins(x_BTD, projection):
            return multiply(x_BTD, projection, self.product(projection)).unflatten(2, (len(self.A_log), -1))
        return self.convert_step(projection(x_BTD))

    def product(self, projection: nn.Module) -> Product:
        """The product with x whose result is g, or what follows from g."""
        return Product(cast(Tensor, projection.weight), "decay", self.dt_bias, self.A_log)

    def convert_step(self, step: Tensor) -> Tensor:
        """step [B, T, heads * channels] -> g [B, T, heads, channels]."""
        excess = (at_least_float32(self.A_log) - LARGEST_LOG_RATE).relu()
        channels = len(self.dt_bias) // len(excess)
        bias = at_least_float32(self.dt_bias) + excess.repeat_interleave(channels)
        if channels > 1 and trains_on_gpu(step) and takes_rows("auto", step):
            g = channel_decay(step, bias, exp_rate(self.A_log).repeat_interleave(channels))
            return g.unflatten(2, (len(excess), -1))
        return self.log_decay(F.softplus(at_least_float32(step) + bias))


class HeadDecay(SoftplusDecay, ProjectedGate):
    """One decay per head (Mamba-2, Gated DeltaNet): g [B, T, num_heads]."""

    def __init__(self, hidden_size: int, num_heads: int, long_memory: str | None = None) -> None:
        super().__init__(num_heads, num_heads, long_memory=long_memory)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if joins(x_BTD, self.a_proj):
            return multiply(x_BTD, self.a_proj, self.product(self.a_proj))
        return self.finish(self.a_proj(x_BTD))

    def input_products(self) -> InputProducts:
        return [(self.a_proj, self.product(self.a_proj))] if is_plain(self.a_proj) else []

    @property
    def projection(self) -> nn.Module:
        return self.a_proj

    def finish(self, y: Tensor) -> Tensor:
        return self.convert_step(y).squeeze(3)


class ForgetGate(HeadDecay):
    """exp(g) of one decay per head: [B, T, num_heads]."""

    def product(self, projection: nn.Module) -> Product:
        return super().product(projection)._replace(kind="forget")

    def finish(self, y: Tensor) -> Tensor:
        return super().finish(y).exp()


class StepDecay(SoftplusDecay):
    """Step size dt, kept within limits, and decay of Mamba-2, from steps [B, T, num_heads] that the layer has projected. Values
    of A_log above `LARGEST_LOG_RATE` count as that."""

    def __init__(self, num_heads: int, smallest: float, largest: float | None, long_memory: str | None) -> None:
        super().__init__(num_heads, num_heads, long_memory=long_memory)
        self.limits = smallest, largest

    def forward(self, step_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """dt, g [B, T, num_heads]"""
        if takes_step_decay(step_BTH, self.dt_bias, self.A_log):
            return step_decay(step_BTH, self.dt_bias, self.A_log, *self.limits)
        dt_BTH = self.step_size(step_BTH).clamp(*self.limits)
        return dt_BTH, self.log_decay(dt_BTH).squeeze(3)


class KimiDecay(SoftplusDecay, ProjectedGate):
    """One decay per key channel (Kimi Linear): g [B, T, num_heads, channels], projected through `channels` dimensions, with
    one rate per head and one dt_bias per channel."""

    def __init__(self, hidden_size: int, num_heads: int, channels: int, long_memory: str | None = None) -> None:
        super().__init__(num_heads, num_heads * channels, rates=(1.0, 16.0), long_memory=long_memory)
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, channels, bias=False), nn.Linear(channels, num_heads * channels, bias=False)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        first = self.projection
        return self.convert_step(self.f_proj(x_BTD)) if first is None else self.finish(project(x_BTD, first))

    def input_products(self) -> InputProducts:
        return plain_products(self.f_proj)

    @property
    def projection(self) -> nn.Module | None:
        return find_first_part(self.f_proj)

    def finish(self, y: Tensor) -> Tensor:
        return self.compute_decay(y, self.f_proj[1])


class FixedDecay(nn.Module):
    """One decay per head that nothing changes (RetNet): g = log(1 - 2^(-5 - h)) for head h, [B, T, num_heads]."""

    part = HeadPart()

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x_BTD: Tensor) -> Tensor:
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        first = self.part.rank * self.num_heads
        share = torch.logspace(
            -5 - first, -4 - first - self.num_heads, self.num_heads, 2.0, device=x_BTD.device, dtype=dtype
        )
        return share.neg_().log1p_().expand(*x_BTD.shape[:2], -1)


class RampedLinear(OwnInitialMatrices, nn.Linear):
    """The projection of GLA's decay, [..., rank] to [..., heads * channels], with biases that give slow first decays."""

    def __init__(self, rank: int, num_heads: int, channels: int, long_memory: str, divisor: float) -> None:
        self.num_heads, self.channels = num_heads, channels
        self.long_memory, self.divisor = long_memory, divisor
        nn.Linear.__init__(self, rank, num_heads * channels)

    def initial_values(self, std: float = 0.02) -> dict[str, Tensor]:
        rate, step = make_ramps(self.long_memory, self.num_heads, RATES, self.weight.device)
        bias = -torch.expm1(self.divisor * rate * step).log()  # logsigmoid(bias) = -divisor A dt
        weight = torch.empty_like(self.weight, dtype=torch.float32).normal_(std=std)
        return {"weight": weight, "bias": bias.repeat_interleave(self.channels)}


class GLADecay(ProjectedGate):
    """One decay per key channel (gated linear attention, section 4): g = logsigmoid(W2 W1 x + b) / 16, with rank 16.

    The divisor keeps the first decays near 1, so that the memory is long before training shortens it. In a model b begins at 0,
    for windows of 24 tokens in all channels. There is no A and no dt. A `long_memory` other than "own", the default, sets the
    first b so that g = -A dt, with A and dt of the ramp that it names.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, channels: int, long_memory: str | None = None, rank: int = 16,
        divisor: float = 16.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.channels = channels
        self.divisor = divisor
        first = nn.Linear(hidden_size, rank, bias=False)
        if long_memory in (None, "own"):
            self.gk_proj = nn.Sequential(first, nn.Linear(rank, num_heads * channels, bias=True))
        else:
            self.gk_proj = nn.Sequential(first, RampedLinear(rank, num_heads, channels, str(long_memory), divisor))

    def forward(self, x_BTD: Tensor) -> Tensor:
        first = self.projection
        return self._decay(self.gk_proj(x_BTD)) if first is None else self.finish(project(x_BTD, first))

    def input_products(self) -> InputProducts:
        return plain_products(self.gk_proj)

    @property
    def projection(self) -> nn.Module | None:
        return find_first_part(self.gk_proj)

    def finish(self, y: Tensor) -> Tensor:
        second = cast(nn.Linear, self.gk_proj[1])
        if joins(y, second):
            decay = Product(second.weight, "logsigmoid", second.bias, largest=1 / self.divisor)
            return multiply(y, second, decay).unflatten(2, (-1, self.channels))
        return self._decay(second(y))

    def _decay(self, z: Tensor) -> Tensor:
        return (F.logsigmoid(at_least_float32(z)) / self.divisor).unflatten(2, (-1, self.channels))
