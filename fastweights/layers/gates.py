"""Gains computed from the input: of a write, of a gradient step, of an importance, and of a preconditioner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import palimpsa
from ..ops.authoring import Product, State, exp_rate, expand_heads
from .decay import HeadDecay
from .initialization import OwnInitialValues, UniformLinear
from .norms import at_least_float32
from .shared_input import InputProducts, ProjectedGate, is_plain, joins, multiply, plain_products, project

__all__ = ["ImportanceGain", "PreconditionerGates", "SigmoidGain", "StepSize", "VarianceShift", "WindowThreshold"]

LEAST_FORGETTING = 1e-6  # 1 - a of the longest memory window that is told apart, a million tokens
SMALLEST_VARIANCE = 1e-12


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
            return multiply(x_BTD, self.b_proj, self.product())
        return self.finish(self.b_proj(x_BTD))

    def product(self) -> Product:
        return Product(self.b_proj.weight, "sigmoid", self.b_proj.bias, largest=self.largest)

    def input_products(self) -> InputProducts:
        return [(self.b_proj, self.product())] if is_plain(self.b_proj) else []

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
        if joins(x_BTD, self.gate.b_proj):
            return multiply(x_BTD, self.gate.b_proj, self.product())
        return self._scaled(self.gate(x_BTD))

    def product(self) -> Product:
        return self.gate.product()._replace(other=self.log_rate)

    def input_products(self) -> InputProducts:
        return [(self.gate.b_proj, self.product())] if is_plain(self.gate.b_proj) else []

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
        return self.before_sigmoid(x_BTD), F.softplus(at_least_float32(self.b_scale)) * s_BTG

    def before_sigmoid(self, x_BTD: Tensor) -> Tensor:
        """z alone, for `importance_writes`, which computes c itself."""
        return project(x_BTD, self.beta_proj).unflatten(2, (len(self.b_scale), -1))

    def input_products(self) -> InputProducts:
        return plain_products(self.beta_proj)


class WindowThreshold(OwnInitialValues):
    """The share of its importance that a head keeps: tanh(max(0, m - threshold)). m is the mean of log N over the tokens so
    far, with the memory window N = 1/(1 - a) of a token. The threshold is learned, one per head.

    Palimpsa (section 3.2) proposes metaplastic heads where the average log N exceeds a learned threshold. The share is
    continuous, so that gradients reach the threshold. Below the threshold it is exactly 0, and the head is gated linear
    attention. The mean is the answer of a Palimpsa memory of one number per head, to which every token writes log N with the
    same key.
    """

    states: ClassVar[Mapping[str, State]] = {"log_windows": State("G"), "tokens": State("G")}
    _no_weight_decay = ("threshold",)

    def __init__(self, num_heads: int, first: float) -> None:
        super().__init__()
        self.first = first
        self.threshold = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"threshold": torch.full_like(self.threshold, self.first)}

    def forward(self, g_BTG: Tensor, run: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The share [B, T, num_heads] for log decays g, and the state for the next call. run: the layer's `RuleCall`."""
        log_window = -torch.expm1(g_BTG).neg().clamp_min(LEAST_FORGETTING).log()[..., None]
        one, zero = torch.ones_like(log_window), torch.zeros_like(g_BTG)
        no_prior = 1e-30
        mean, windows = run(
            palimpsa, one, one, log_window, one, zero, prior=no_prior, scale=1.0, state=tuple(self.states)
        )
        return (mean[..., 0] - at_least_float32(self.threshold)).relu().tanh(), windows


class VarianceShift(OwnInitialValues):
    """c log u, with one learned c per head, 0 at first: the variance of an answer shifts the projection of its gate by it.

    u in (0, 1] is the variance, divided by the variance before any key was written. A head with c below 0 opens its gate where
    it knows the answer. Palimpsa (section 2) proposes the use of the variance and prints no form.
    """

    _no_weight_decay = ("c",)

    def __init__(self, num_heads: int, prior: float) -> None:
        super().__init__()
        self.prior = prior
        self.c = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"c": torch.zeros_like(self.c)}

    def forward(self, variance_BTGV: Tensor, q: Tensor) -> Tensor:
        """The shift [B, T, G, V] for the variance of answers to q [B, T, H, K], which has its scale."""
        first_BTG1 = expand_heads(at_least_float32(q).square().sum(-1, keepdim=True), len(self.c)) / self.prior
        share_BTGV = (at_least_float32(variance_BTGV) + SMALLEST_VARIANCE) / (first_BTG1 + SMALLEST_VARIANCE)
        return at_least_float32(self.c)[:, None] * share_BTGV.log()


class PreconditionerGates(nn.Module):
    """Decay and gain of the running key energy A. They have projections of their own (Preconditioned DeltaNet, section 4.2) or,
    when `tied`, are those of the memory (appendix E.3 finds this worse)."""

    def __init__(self, hidden_size: int, num_heads: int, tied: bool, long_memory: str | None = None) -> None:
        super().__init__()
        self.tied = tied
        if not tied:
            self.decay = HeadDecay(hidden_size, num_heads, long_memory)
            self.gain = SigmoidGain(hidden_size, num_heads)

    @property
    def own(self) -> tuple[nn.Module, ...]:
        """The gates of decay and gain, () where they are tied."""
        return () if self.tied else (self.decay, self.gain)

    def forward(self, own: Sequence[Tensor], g_BTG: Tensor | None, beta_BTG: Tensor | None) -> tuple[Tensor, Tensor]:
        """g, beta [B, T, num_heads] of A. own: results of the gates in `own`. Tied gates return the memory's g (zeros where it
        is None) and beta."""
        if not self.tied:
            g, beta = own
            return g, beta
        assert beta_BTG is not None
        return torch.zeros_like(beta_BTG) if g_BTG is None else g_BTG, beta_BTG
