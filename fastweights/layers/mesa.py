"""Mesa layer: ridge regression on all past tokens, weighted by their decay, with a learned ridge per key channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_positive
from ..ops import mesa
from .decay import HeadDecay
from .gates import SigmoidGain
from .gates_together import gates_together
from .initialization import OwnInitialValues, inverse_softplus
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import at_least_float32
from .options import DecayOptions, MemoryOptions, one_of, option, up_to
from .registry import SOLVE, register_mixer

__all__ = ["MesaNet", "MesaOptions"]


@dataclass(frozen=True, kw_only=True)
class MesaOptions(DecayOptions, MemoryOptions):
    """Options of `MesaNet`, whose docstring explains them."""

    decay: str = option("head", one_of("none", "head"))
    gain: str | None = option("beta", one_of(None, "beta"))
    ridge: float = option(1.0, check_positive)
    smallest_ridge: float = option(0.25, check_positive)
    iterations: int = option(30, up_to(mesa.spec.options["iterations"].most))

    def check_together(self) -> None:
        super().check_together()
        if self.ridge <= self.smallest_ridge:
            raise ValueError(f"ridge must be above smallest_ridge, {self.smallest_ridge}, got {self.ridge}")


class LearnedRidge(OwnInitialValues):
    """smallest + softplus(weight), [num_heads, channels] in float32 or better."""

    _no_weight_decay = ("weight",)

    def __init__(self, num_heads: int, channels: int, first: float, smallest: float) -> None:
        super().__init__()
        self.first, self.smallest = first, smallest
        self.weight = nn.Parameter(torch.empty(num_heads, channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        above = torch.full_like(self.weight, self.first - self.smallest, dtype=torch.float32)
        return {"weight": inverse_softplus(above)}

    def forward(self) -> Tensor:
        return self.smallest + F.softplus(at_least_float32(self.weight))


@register_mixer(
    "mesa",
    summary="MesaNet: ridge regression on the decayed past with a learned ridge per key channel",
    equation="H = a H + beta k k^T, U = a U + beta k v^T, o = U^T (H + Diag(ridge))^-1 q",
    source="von Oswald et al. 2025 (MesaNet); Gated KalmaNet, section 3.2",
    cost=f"H ({SOLVE}), r iterations",
)
class MesaNet(MemoryLayer):
    r"""A sequence mixer that answers with the ridge regression of all values on all keys so far, weighted by their decay.

    $$H_t = a_t H_{t-1} + \beta_t k_t k_t^\top, \qquad U_t = a_t U_{t-1} + \beta_t k_t v_t^\top, \qquad
      o_t = U_t^\top (H_t + \Lambda)^{-1} q_t$$

    with unit q and k, one decay a and one gain beta in (0, 1) per head, and a learned diagonal Lambda; solved by conjugate
    gradients. MesaNet (von Oswald et al. 2025), the baseline of Gated KalmaNet (whose ridge follows |H_t|). Projections,
    convolutions and the decay's form are those of the other layers here; the paper's has the sigmoid of a projection for the
    decay and no convolution on v.

    Args:
        decay: "head" (one decay per head) or "none".
        gain: "beta" (sigmoid of a projection, one number per head) or None (beta 1).
        ridge: first value of Lambda, above smallest_ridge.
        smallest_ridge: positive lower bound of Lambda, which keeps the regression solvable.
        iterations: steps of conjugate gradients.

    The other options are those of `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = MesaOptions
    op = mesa
    decodes_in_pool = True
    options: MesaOptions
    probes = {**MemoryLayer.probes, "g": "decay", "beta": "gain", "ridge": ""}

    def build(self) -> None:
        options, heads = self.options, self.heads
        self.decay = None
        if options.decay == "head":
            self.decay = HeadDecay(self.hidden_size, heads.value_heads, options.long_memory)
        self.gain = SigmoidGain(self.hidden_size, heads.value_heads) if options.gain else None
        self.ridge = LearnedRidge(heads.value_heads, heads.key, options.ridge, options.smallest_ridge)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        g_BTG, beta_BTG = gates_together(x_BTD, self.decay, self.gain)
        ridge_GK = self.ridge()
        self.probe(g=g_BTG, beta=beta_BTG, ridge=ridge_GK)
        g_BTG = torch.zeros_like(v_BTGV[..., 0]) if g_BTG is None else g_BTG
        beta_BTG = torch.ones_like(v_BTGV[..., 0]) if beta_BTG is None else beta_BTG
        return run(
            self.op, q_BTHK, k_BTHK, v_BTGV, g_BTG, beta_BTG, ridge_GK, iterations=self.options.iterations
        )  # fmt: skip
