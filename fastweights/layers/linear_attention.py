"""Linear attention layer: additive memory with decay, gain and preconditioner as independent options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_flag
from ..ops import linear_attention, precondition_queries
from ..ops.authoring import State, divide_answers, expand_heads, gated_writes, positive_keys, takes_positive_keys
from .decay import FixedDecay, GLADecay, HeadDecay
from .gates import SigmoidGain
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import l2_normalize
from .options import MemoryOptions, one_of, option
from .preconditioner import SIDES, PreconditionerOptions, build_preconditioner, find_gates
from .projections import choose_layer_backend
from .registry import ADDITIVE, KEY_ENERGY, PDN, register_mixer, register_variants
from .shared_input import compute_gates

__all__ = ["LinearAttention", "LinearAttentionOptions"]

SMALLEST_DIVISOR = 1e-4
FEATURE_MAPS = {"identity": lambda x: x, "elu": lambda x: F.elu(x) + 1}


@dataclass(frozen=True, kw_only=True)
class LinearAttentionOptions(PreconditionerOptions, MemoryOptions):
    """Options of `LinearAttention`, whose docstring explains them."""

    decay: str = option("none", one_of("none", "head", "channel", "fixed"))
    gain: str | None = option(None, one_of(None, "beta"))
    feature_map: str = option("identity", one_of(*FEATURE_MAPS))
    normalizer: bool = option(False, check_flag)

    def check_together(self) -> None:
        super().check_together()
        if self.normalizer and (self.feature_map != "elu" or self.preconditioner is not None):
            raise ValueError(
                "normalizer must be False unless feature_map is 'elu' and there is no preconditioner: it divides by z.q, which "
                "must be positive"
            )


@register_mixer(
    "linear",
    summary="linear attention: adds every key-value pair",
    equation="S = S + k v^T",
    source="Katharopoulos et al. 2020, section 3",
    cost=f"H ({ADDITIVE})",
)
class LinearAttention(MemoryLayer):
    r"""A sequence mixer whose memory is the (decayed) sum of key-value outer products.

    $$S_t = \mathrm{Diag}(a_t) S_{t-1} + \beta_t k_t v_t^\top, \qquad o_t = S_t^\top \tilde q_t$$

    Linear attention, RetNet (without its rotation of q and k), gated linear attention and, with the preconditioner, PLA,
    P-Mamba-2 and PGLA (Preconditioned DeltaNet, sections 3.4 and 5, appendix E.3). Queries and keys pass a short
    convolution, SiLU, the feature map and the L2 norm. The answer of each head is normalised separately. This norm cancels
    every positive factor of a head, so the layer divides by the sum of the weights only with `normalizer`.

    Args:
        decay: "none", "head" (one decay per head, as in Mamba-2), "channel" (one per key channel, as in GLA) or "fixed" (RetNet's
            1 - 2^(-5 - h) for head h).
        gain: None (beta 1) or "beta" (beta = sigmoid of a projection, one number per head).
        feature_map: function of queries and keys, "identity" or "elu" (ELU + 1).
        normalizer: whether the answer is divided by z.q, at least 1e-4, with z the decayed sum of beta k (Katharopoulos et al.).

    The other options are those of `fastweights.layers.preconditioner.PreconditionerOptions` (preconditioner and its settings),
    `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = LinearAttentionOptions
    decodes_in_pool = True
    options: LinearAttentionOptions
    probes = {
        **MemoryLayer.probes,
        "g": "decay",
        "beta": "gain",
        "write_key": "key_preconditioner",
        "precond_g": "preconditioner",
        "precond_beta": "preconditioner",
    }

    def build_projection(self, normalize_qk: bool | None = None) -> None:
        # Any other feature map comes between the projection's activation and the norm.
        options = self.options
        self.normalizes_features = options.normalize_qk and options.feature_map != "identity"
        super().build_projection(normalize_qk=options.normalize_qk and options.feature_map == "identity")

    def build(self) -> None:
        options, heads, hidden_size = self.options, self.heads, self.hidden_size
        self.decay: nn.Module | None = None
        if options.decay == "head":
            self.decay = HeadDecay(hidden_size, heads.value_heads, options.long_memory)
        elif options.decay == "channel":
            self.decay = GLADecay(hidden_size, heads.value_heads, heads.key, options.long_memory)
        elif options.decay == "fixed":
            self.decay = FixedDecay(heads.value_heads)
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if options.gain else None
        self.ridge = options.ridge  # a plain attribute, which conversions make large
        self.preconditioner: Any = build_preconditioner(hidden_size, heads.value_heads, options)

    @property
    def key_preconditioner(self) -> Any:
        """The preconditioner of keys, None without one. By the option: an adapter may wrap the module."""
        return self.preconditioner if "key" in SIDES[self.options.preconditioner] else None

    def gates(self) -> Sequence[nn.Module | None]:
        gates = find_gates(self.preconditioner, self.options)
        return (self.decay, self.gain, *(() if gates is None else gates.own))

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        backend = choose_layer_backend(self.options.backend)
        if self.options.feature_map == "elu" and takes_positive_keys(q_BTHK, k_BTHK, backend=backend):
            q_BTHK, k_BTHK, _ = positive_keys(q_BTHK, k_BTHK)
        else:
            q_BTHK, k_BTHK = (FEATURE_MAPS[self.options.feature_map](y) for y in (q_BTHK, k_BTHK))
        if self.normalizes_features:
            q_BTHK, k_BTHK = l2_normalize(q_BTHK), l2_normalize(k_BTHK)
        gates, sides = find_gates(self.preconditioner, self.options), SIDES[self.options.preconditioner]
        g, beta_BTG, *own = compute_gates(x_BTD, *self.gates(), products=run.products)
        energy: dict[str, Tensor | None] = {}
        if beta_BTG is not None:
            v_BTGV, _ = gated_writes(v_BTGV, beta_BTG, backend=backend)
        write_key = k_BTHK
        if gates is not None:
            weight = torch.ones_like(v_BTGV[..., 0]) if beta_BTG is None and gates.tied else beta_BTG
            precond_g, precond_beta = gates(own, g, weight)
            self.probe(precond_g=precond_g, precond_beta=precond_beta)
            if "query" in sides:
                q_BTHK, energy = run(
                    precondition_queries,
                    q_BTHK,
                    k_BTHK,
                    precond_g,
                    precond_beta,
                    ridge=self.ridge,
                    keep="key" not in sides,
                )
                k_BTHK = write_key = expand_heads(k_BTHK, q_BTHK.shape[2])
            if "key" in sides:
                write_key, energy = self.preconditioner.write_keys(k_BTHK, precond_g, precond_beta, run)
                self.probe(write_key=write_key)
                q_BTHK = expand_heads(q_BTHK, write_key.shape[2])
        self.probe(q=q_BTHK, k=k_BTHK, v=v_BTGV, g=g, beta=beta_BTG)
        if self.options.normalizer:
            return self._weighted_mean(q_BTHK, k_BTHK, v_BTGV, g, beta_BTG, run)
        o_BTGV, memory = run(linear_attention, q_BTHK, write_key, v_BTGV, g)
        return o_BTGV, {**memory, **energy}

    def _weighted_mean(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, run: RuleCall
    ) -> Answer:
        """S^T q / (z.q) and the memory S, z. v: values with their gain."""
        weight = torch.ones_like(v[..., :1]) if beta is None else beta[..., None].to(v.dtype)
        o, memory = run(linear_attention, q, k, v, g, scale=1.0)
        divisor, weights = run(linear_attention, q, k, weight, g, scale=1.0, state=("z",))
        backend = choose_layer_backend(self.options.backend)
        return divide_answers(o, divisor[..., 0], SMALLEST_DIVISOR, backend=backend), {**memory, **weights}

    @classmethod
    def states(cls, options: Any) -> Mapping[str, State]:
        states = dict(linear_attention.spec.states)
        if options.preconditioner:
            states |= precondition_queries.spec.states
        return {**states, "z": State("GK")} if options.normalizer else states


# Options, summary, equation and source of the other mixers of this layer.
VARIANTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "gla": (
        {"decay": "channel", "output_gate": "silu"},
        "gated linear attention: one decay per key channel",
        "S = Diag(a) S + k v^T",
        "Yang et al. 2024 (GLA), section 4",
    ),
    "pla": (
        {"preconditioner": "query"},
        "preconditioned linear attention: queries divided by the key channels' energy",
        f"S = S + k v^T, {KEY_ENERGY}, q~ = q / (A + ridge)",
        f"{PDN}, sections 3.3 and 5, appendix F.2.2",
    ),
    "pgla": (
        {"decay": "channel", "preconditioner": "query", "output_gate": "silu"},
        "gated linear attention with preconditioned queries, as pla has",
        f"S = Diag(a) S + k v^T, {KEY_ENERGY}, q~ = q / (A + ridge)",
        f"{PDN}, sections 3.4 and 5, appendix F.2.2",
    ),
    "pmamba2": (
        {"decay": "head", "gain": "beta", "preconditioner": "query"},
        "preconditioned Mamba-2 rule: one decay and one gain per head",
        f"S = a S + beta k v^T, {KEY_ENERGY}, q~ = q / (A + ridge)",
        f"{PDN}, appendix E.3 and F.2.2",
    ),
    "pmamba2-tied": (
        {"decay": "head", "gain": "beta", "preconditioner": "query", "tie_preconditioner": True},
        "pmamba2 whose key energy has the decay and gain of the memory",
        "S = a S + beta k v^T, A = a A + beta k^2, q~ = q / (A + ridge)",
        f"{PDN}, appendix E.3",
    ),
    "pmamba2-key": (
        {"decay": "head", "gain": "beta", "preconditioner": "key"},
        "Mamba-2 rule with the key-side preconditioner of PDN",
        f"S = a S + beta w v^T, {KEY_ENERGY}, w as in pdn",
        f"{PDN}, appendix B (key-side preconditioning of the offline solve)",
    ),
    "retnet": (
        {"decay": "fixed", "output_gate": "silu"},
        "RetNet's retention: one fixed decay per head",
        "S = a S + k v^T, a = 1 - 2^(-5 - h) for head h",
        f"Sun et al. 2023 (RetNet), by {PDN}, table 2",
    ),
}
register_variants(LinearAttention, ADDITIVE, VARIANTS)
