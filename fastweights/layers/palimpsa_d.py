"""Palimpsa-D layer: gated linear attention on Gated DeltaNet's layout, with an importance for every association."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .decay import HeadDecay
from .gates import SigmoidGain
from .gates_together import gates_together
from .memory_layer import Answer, MemoryLayer, RuleCall
from .options import MemoryOptions, one_of, option
from .posterior import PosteriorLayer, PosteriorOptions
from .projections import GATES, ValueSkip
from .registry import register_mixer
from .wrapped import is_bare

__all__ = ["PalimpsaD", "PalimpsaDOptions"]


@dataclass(frozen=True, kw_only=True)
class PalimpsaDOptions(PosteriorOptions, MemoryOptions):
    """Options of `PalimpsaD`, whose docstring explains them."""

    gain: str | None = option("beta", one_of(None, "beta"))
    output_gate: str | None = option("silu", one_of(None, *GATES), or_none=True)


@register_mixer(
    "palimpsa-d",
    summary="Palimpsa on Gated DeltaNet's layout: associations that many keys have written to are rewritten slowly",
    equation="M = a M + k (s v)^T, J = a J + k^2 beta^T, o = (M / (J + p))^T q + D v",
    source="Palimpsa, sections 2.3 and 2.4, appendix A.1",
    cost="28 H K V",
)
class PalimpsaD(PosteriorLayer, MemoryLayer):
    r"""A sequence mixer whose memory keeps an importance for each of its elements.

    $$M_t = a_t M_{t-1} + k_t (s_t v_t)^\top, \qquad J_t = a_t J_{t-1} + k_t^2 \beta_t^\top, \qquad
      o_t = \Big(\frac{M_t}{J_t + p}\Big)^\top q_t + D v_t$$

    with $s_t$ the sigmoid of a projection, one number per head, and
    $\beta_t = \mathrm{sigmoid}(W_2 W_1 x_t)\, \mathrm{softplus}(b)\, s_t$, one per value channel. An association that many keys
    have written to has a high importance J + p and is rewritten slowly (metaplasticity). Projections, convolutions, decay,
    unit q and k and the gated norm are Gated DeltaNet's; there is no delta rule. Palimpsa, sections 2.3 and 2.4, appendix
    A.1. Without metaplasticity J is 0: gated linear attention, and b -> -inf gives the same.

    Args:
        gain: "beta" (s as above) or None (s = 1).
        output_gate: None, "sigmoid", "gelu" or, the default, "silu".

    The other options are those of `fastweights.layers.posterior.PosteriorOptions` (metaplasticity, prior, b_scale,
    beta_init, residual, skip_init; D v takes v before s), of `DecayOptions` (long_memory) and of `MemoryOptions`.
    """

    Options = PalimpsaDOptions
    decodes_in_pool = True
    options: PalimpsaDOptions
    probes = {**MemoryLayer.probes, "g": "", "step_size": "gain", "importance": "importance"}

    def build(self) -> None:
        options, heads, hidden_size = self.options, self.heads, self.hidden_size
        self.decay = HeadDecay(hidden_size, heads.value_heads, options.long_memory)
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if options.gain else None
        self.build_importance()

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        s_BTG, g_BTG = gates_together(x_BTD, self.gain, self.decay)
        gate_BTG = torch.ones_like(v_BTGV[..., 0], dtype=torch.float32) if s_BTG is None else s_BTG
        write_BTGV, beta_BTGV = self.gate_writes(x_BTD, v_BTGV, gate_BTG, self.options.backend)
        self.probe(step_size=s_BTG, importance=beta_BTGV, g=g_BTG)
        return self.read_posterior(run, q_BTHK, k_BTHK, write_BTGV, beta_BTGV, g_BTG, scale=self.heads.key**-0.5)

    def read_out(self, o_BTGV: Tensor, v_BTGV: Tensor, x_BTD: Tensor) -> Tensor:
        self.probe(output_gate=lambda: self.output.gate_values(x_BTD))
        if self.skip is None:
            return self.output(o_BTGV, x_BTD)
        if self.options.output_norm and is_bare(self.skip, ValueSkip):
            return self.output(o_BTGV, x_BTD, v_BTGV, self.skip.D)
        return self.output(self.skip(o_BTGV, v_BTGV), x_BTD)
