"""DeltaNet: error-correcting memory with decay, gain, feedback, preconditioner and learnt write key as options; and the
elementwise form of Longhorn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_flag, check_number
from ..ops import delta_rule, elementwise_longhorn, precondition_queries, preconditioned_delta_rule
from ..ops.authoring import State, expand_heads, read_keys, takes_delta_writes, write_gain
from .decay import HeadDecay, KimiDecay
from .gates import SigmoidGain
from .initialization import OwnInitialValues
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import at_least_float32
from .options import MemoryOptions, one_of, option
from .preconditioner import SIDES, LearntWriteKey, PreconditionerOptions, build_preconditioner, find_gates
from .projections import choose_layer_backend
from .registry import DELTA, KEY_ENERGY, PDN, register_mixer, register_variants
from .shared_input import InputProducts, compute_gates, plain_products, project

__all__ = ["DeltaNet", "ElementwiseLonghorn"]

# The key that is read is divided by the decay. A decay below exp(-10) counts as that, so that float16 can hold the quotient.
SMALLEST_LOG_DECAY = -10.0


class ClosedLoop(OwnInitialValues):
    """b = sigmoid(share), one per value head, which begins at sigmoid(1) as released, and d = correction, one per q/k head."""

    _no_weight_decay = ("share", "correction")

    def __init__(self, key_heads: int, value_heads: int, state_feedback: bool, output_correction: float | None) -> None:
        super().__init__()
        self.first_correction = output_correction
        self.share = nn.Parameter(torch.empty(value_heads)) if state_feedback else None
        self.correction = nn.Parameter(torch.empty(key_heads)) if output_correction is not None else None
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        first = {"share": 1.0, "correction": self.first_correction}
        return {name: torch.full_like(parameter, first[name] or 0.0) for name, parameter in self.named_parameters()}

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, g_BTG: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Queries q - d k; the keys that are read and those that are written [B, T, G, K], None where a write corrects the whole
        answer; and the log decay that belongs to them."""
        if takes_delta_writes(k_BTHK, q_BTHK, g_BTG, self.share, self.correction):
            return self._in_one_launch(q_BTHK, k_BTHK, g_BTG)
        if self.correction is not None:
            q_BTHK = (q_BTHK - at_least_float32(self.correction)[:, None] * k_BTHK).to(q_BTHK.dtype)
        if self.share is None:
            return q_BTHK, None, g_BTG
        k_BTGK = expand_heads(k_BTHK, len(self.share))
        read_BTGK, g_BTG = self._read_keys(k_BTGK, self.share, g_BTG)
        return q_BTHK, (read_BTGK, k_BTGK), g_BTG

    def _in_one_launch(
        self, q_BTHK: Tensor, k_BTHK: Tensor, g_BTG: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        q = None if self.correction is None else q_BTHK
        heads = k_BTHK.shape[2] if self.share is None else len(self.share)
        read_BTGK, moved_BTHK, least_g_BTG = read_keys(
            k_BTHK, heads, q=q, correction=self.correction, share=self.share,
            g=None if self.share is None else g_BTG, least=SMALLEST_LOG_DECAY,
        )  # fmt: skip
        q_BTHK = q_BTHK if moved_BTHK is None else moved_BTHK
        if read_BTGK is None:
            return q_BTHK, None, g_BTG
        return q_BTHK, (read_BTGK, expand_heads(k_BTHK, heads)), least_g_BTG

    def _read_keys(self, k_BTGK: Tensor, share_G: Tensor, g_BTG: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """b k / a, whose answer by the decayed memory a S is b S^T k, and the log decay, cut off where it is too small."""
        g_BTG = None if g_BTG is None else g_BTG.clamp_min(SMALLEST_LOG_DECAY)
        factor = torch.sigmoid(at_least_float32(share_G))
        if g_BTG is not None:
            factor = factor * (-g_BTG).exp()
        return (at_least_float32(k_BTGK) * factor[..., None]).to(k_BTGK.dtype), g_BTG


# The gain of a write from beta, the overlap m = k.w of the key read with the key written, and the decay a.
GAINS = {
    "beta": lambda beta, m, a: beta,
    "longhorn": lambda beta, m, a: beta / (1 + beta * m),
    "fading": lambda beta, m, a: beta / (a + beta * m).clamp_min(1e-6),
    "unit": lambda beta, m, a: beta / m.clamp_min(1e-6),
    "damped": lambda beta, m, a: beta / (1 + m),
    "exact": lambda beta, m, a: -torch.expm1(-beta * m.clamp_min(1e-6)) / m.clamp_min(1e-6),
    "nlms": lambda beta, m, a: 1 / m.clamp_min(1e-6),
}


@dataclass(frozen=True, kw_only=True)
class DeltaNetOptions(PreconditionerOptions, MemoryOptions):
    """Options of `DeltaNet`, whose docstring explains them."""

    decay: str = option("none", one_of("none", "head", "channel"))
    gain: str = option("beta", one_of(*GAINS))
    negative_eigenvalues: bool = option(False, check_flag)
    learn_write_key: bool = option(False, check_flag)
    state_feedback: bool = option(False, check_flag)
    output_correction: float | None = option(None, check_number)

    def check_together(self) -> None:
        super().check_together()
        if self.gain == "fading" and self.decay == "channel":
            raise ValueError("gain must not be 'fading' with decay 'channel': it takes one decay per head")
        if self.gain == "nlms" and (self.negative_eigenvalues or self.tie_preconditioner):
            raise ValueError(
                "gain must not be 'nlms' with negative_eigenvalues or tie_preconditioner: it has no beta to enlarge or share"
            )
        if self.state_feedback and (self.decay == "channel" or self.preconditioner or self.gain != "beta"):
            raise ValueError(
                "state_feedback must be False with decay 'channel', a preconditioner or a gain other than 'beta': the key that "
                "is read then takes the decay of the head"
            )
        if self.learn_write_key and (
            "key" in SIDES[self.preconditioner] or self.state_feedback or self.squash == "none"
        ):
            raise ValueError(
                "learn_write_key must be False with preconditioner 'key' or 'both', state_feedback or squash 'none': each "
                "of them says along which keys tokens are written"
            )

    @property
    def largest_beta(self) -> float:
        """1, or with negative eigenvalues the largest beta for which the eigenvalue 1 - beta k.w of a write to a unit key is at
        least -1 (Preconditioned DeltaNet, lemma E.2): 2, or 2/x where the factors of write keys reach x. Gains other than "beta"
        divide by k.w themselves."""
        if not self.negative_eigenvalues:
            return 1.0
        scaled = self.learn_write_key or ("key" in SIDES[self.preconditioner] and self.squash != "none")
        return 2.0 / self.bound if scaled and self.gain == "beta" and self.interval != "dampen" else 2.0


@register_mixer(
    "deltanet",
    summary="delta rule: corrects what the memory answers to a key",
    equation="S = S + beta k (v - S^T k)^T",
    source="Schlag et al. 2021; Yang et al. 2024 (DeltaNet)",
    cost=f"H ({DELTA})",
)
class DeltaNet(MemoryLayer):
    r"""A sequence mixer whose memory corrects its own answer to each key.

    $$S' = \mathrm{Diag}(a_t) S_{t-1}, \qquad S_t = S' + \beta_t w_t (v_t - S'^\top k_t)^\top, \qquad o_t = S_t^\top q_t$$

    DeltaNet, Gated DeltaNet, Kimi Delta Attention and, with the preconditioner, PDN, PGDN and PKDA (Preconditioned DeltaNet,
    sections 3.5 and 4.2, appendix E); Longhorn, EFLA and NLMS by their gains, Comba by its feedback: the online rows of that
    paper's table 2. Without the preconditioner w = k.

    Args:
        decay: "none", "head" (one decay per head, Gated DeltaNet) or "channel" (one per key channel, Kimi Linear).
        gain: factor of the write: "beta" = sigmoid of a projection; or from it and m = k.w "longhorn" = beta/(1 + beta m)
            (Longhorn), "fading" = beta/(a + beta m) with the decay a of the head, "unit" = beta/m and "damped" =
            beta/(1 + m): write keys normalised as in Preconditioned DeltaNet, table 7, which finds "beta" best. "exact" =
            (1 - exp(-beta m))/m is the step of EFLA, which solves the delta rule's differential equation over a time beta, and
            "nlms" = 1/m that of normalised least mean squares, without beta.
        negative_eigenvalues: whether beta reaches 2 instead of 1, so that a write can flip the sign of what it replaces; 2/x
            with preconditioned keys whose factors reach x, which keeps the eigenvalues of every step within [-1, 1].
        learn_write_key: whether a projection makes w of k, by factors in [1/x, x] per channel, without the running energy of
            the preconditioner (Preconditioned DeltaNet, section 4.1): `fastweights.layers.preconditioner.LearntWriteKey`.
        state_feedback: whether a write corrects a fraction b, one learned number per head, of the memory's answer before the
            decay: S = a S + beta k (v - b S^T k)^T (Comba).
        output_correction: first value of d, one learned number per head, in queries q - d k (Comba); None for none.
        normalize_qk: whether queries and keys are divided by their length; unit keys keep gain "beta" stable.

    The other options are those of `fastweights.layers.preconditioner.PreconditionerOptions` (preconditioner and its settings),
    `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = DeltaNetOptions
    decodes_in_pool = True
    options: DeltaNetOptions
    probes = {
        **MemoryLayer.probes,
        "g": "decay",
        "beta": "",
        "read_key": "feedback.share",
        "write_key": "writer",
        "precond_g": "preconditioner",
        "precond_beta": "preconditioner",
    }

    def build(self) -> None:
        options, heads, hidden_size = self.options, self.heads, self.hidden_size
        self.gain = None
        if options.gain != "nlms":
            self.gain = SigmoidGain(hidden_size, heads.value_heads, largest=options.largest_beta)
        self.decay: nn.Module | None = None
        if options.decay == "head":
            self.decay = HeadDecay(hidden_size, heads.value_heads, options.long_memory)
        elif options.decay == "channel":
            self.decay = KimiDecay(hidden_size, heads.value_heads, heads.key, options.long_memory)
        self.ridge = options.ridge  # a plain attribute, which conversions make large
        self.preconditioner: Any = build_preconditioner(hidden_size, heads.value_heads, options)
        self.feedback = ClosedLoop(
            heads.key_heads, heads.value_heads, options.state_feedback, options.output_correction
        )
        self.learnt = None
        if options.learn_write_key:
            self.learnt = LearntWriteKey(hidden_size, heads.key_heads, heads.key, options)

    @property
    def writer(self) -> Any:
        """The module that makes write keys, None where keys are written along themselves."""
        return self.preconditioner if "key" in SIDES[self.options.preconditioner] else self.learnt

    def gates(self) -> Sequence[nn.Module | None]:
        gates = find_gates(self.preconditioner, self.options)
        return (self.gain, self.decay, *(() if gates is None else gates.own))

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        gates, sides = find_gates(self.preconditioner, self.options), SIDES[self.options.preconditioner]
        beta_BTG, g, *own = compute_gates(x_BTD, *self.gates(), products=run.products)
        if beta_BTG is None:
            beta_BTG = torch.ones_like(v_BTGV[..., 0])
        keys, read_g = None, g
        if self.options.state_feedback or self.options.output_correction is not None:
            q_BTHK, keys, read_g = self.feedback(q_BTHK, k_BTHK, g)
        energy: dict[str, Tensor | None] = {}
        if gates is not None:
            precond_g, precond_beta = gates(own, g, beta_BTG)
            self.probe(precond_g=precond_g, precond_beta=precond_beta)
        if "query" in sides:
            q_BTHK, energy = run(
                precondition_queries, q_BTHK, k_BTHK, precond_g, precond_beta, ridge=self.ridge, keep="key" not in sides
            )
        self.probe(q=q_BTHK, g=g)
        if keys is not None:  # writes along k correct a part of the memory's answer to k before its decay
            read_BTGK, k_BTGK = keys
            q_BTGK = expand_heads(q_BTHK, v_BTGV.shape[2])
            self.probe(beta=beta_BTG, read_key=read_BTGK)
            return run(delta_rule, q_BTGK, read_BTGK, v_BTGV, beta_BTG, read_g, write_key=k_BTGK)
        w = k_BTHK = expand_heads(k_BTHK, q_BTHK.shape[2])
        if self.learnt is not None:
            w = self.learnt(x_BTD, k_BTHK)
        elif "key" in sides:
            made = self.preconditioner
            if self.options.gain == "beta" and self.options.squash == "softsign":  # one op, with kernels
                self.probe(beta=beta_BTG, write_key=lambda: made.write_keys(k_BTHK, precond_g, precond_beta, run)[0])
                return made(
                    run, preconditioned_delta_rule, q_BTHK, k_BTHK, v_BTGV, made.scaled(beta_BTG), g, precond_g=precond_g,
                    precond_beta=precond_beta,
                )  # fmt: skip
            w, energy = made.write_keys(k_BTHK, precond_g, precond_beta, run)  # the gain may need them first
        beta_BTG = self._compute_write_gain(beta_BTG, k_BTHK, w, g)
        self.probe(beta=beta_BTG, write_key=None if self.writer is None else w)
        write_key = None if self.writer is None else w
        o_BTGV, memory = run(delta_rule, q_BTHK, k_BTHK, v_BTGV, beta_BTG, g, write_key=write_key)
        return o_BTGV, {**memory, **energy}

    def _compute_write_gain(self, beta_BTG: Tensor, k_BTHK: Tensor, w: Tensor, g: Tensor | None) -> Tensor:
        """The factor of each write. w: write keys [B, T, H or G, K]."""
        if self.options.gain == "beta":
            return beta_BTG
        backend = choose_layer_backend(self.options.backend)
        if takes_delta_writes(k_BTHK, w, beta_BTG, g, backend=backend):
            decay_BTG = g if self.options.gain == "fading" else None
            return write_gain(beta_BTG, k_BTHK, w, decay_BTG, self.options.gain)
        m = (at_least_float32(expand_heads(k_BTHK, w.shape[2])) * w).sum(-1)
        m_BTG = expand_heads(m, beta_BTG.shape[2])
        return GAINS[self.options.gain](beta_BTG, m_BTG, 1.0 if g is None else g.exp())

    @classmethod
    def states(cls, options: Any) -> Mapping[str, State]:
        return (preconditioned_delta_rule if options.preconditioner else delta_rule).spec.states


KIMI_GATE = {"output_gate": "sigmoid", "gate_low_rank": True}

# Options, summary, equation and source of the other mixers of this layer.
VARIANTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "gdn": (
        {"decay": "head"},
        "gated DeltaNet: delta rule with one decay per head",
        "S' = a S, S = S' + beta k (v - S'^T k)^T",
        "Yang et al. 2025 (Gated DeltaNet), section 3",
    ),
    "kda": (
        {"decay": "channel", **KIMI_GATE},
        "Kimi delta attention: delta rule with one decay per key channel",
        "S' = Diag(a) S, S = S' + beta k (v - S'^T k)^T",
        "Kimi Team 2025 (Kimi Linear), section 3",
    ),
    "pdn": (
        {"preconditioner": "key"},
        "preconditioned DeltaNet: quiet key channels are written more strongly",
        f"S = S + beta w (v - S^T k)^T, {KEY_ENERGY}, w = x^(-r/(1+|r|)) k, r = log A - c",
        f"{PDN}, section 3.5",
    ),
    "pgdn": (
        {"decay": "head", "preconditioner": "key"},
        "gated DeltaNet with preconditioned write keys, as pdn has",
        f"S' = a S, S = S' + beta w (v - S'^T k)^T, {KEY_ENERGY}, w as in pdn",
        f"{PDN}, section 3.5",
    ),
    "pkda": (
        {"decay": "channel", "preconditioner": "key", **KIMI_GATE},
        "Kimi delta attention with preconditioned write keys, as pdn has",
        f"S' = Diag(a) S, S = S' + beta w (v - S'^T k)^T, {KEY_ENERGY}, w as in pdn",
        f"{PDN}, section 3.5",
    ),
    "longhorn": (
        {"gain": "longhorn", "normalize_qk": False},
        "Longhorn: the delta rule's implicit step, stable for keys of any length",
        "S = S + beta/(1 + beta |k|^2) k (v - S^T k)^T",
        "Liu et al. 2024 (Longhorn), section 3",
    ),
    "efla": (
        {"gain": "exact", "normalize_qk": False},
        "EFLA: the delta rule's differential equation solved over a time beta, stable for keys of any length",
        "S = S + (1 - exp(-beta |k|^2))/|k|^2 k (v - S^T k)^T",
        f"Lei et al. 2025 (EFLA), by {PDN}, table 2",
    ),
    "nlms": (
        {"gain": "nlms", "normalize_qk": False},
        "normalised least mean squares: each write answers its key exactly",
        "S = S + k/|k|^2 (v - S^T k)^T",
        f"Wang et al. 2025 (test-time regression), by {PDN}, table 2",
    ),
    "comba": (
        {"decay": "head", "state_feedback": True, "output_correction": 0.02},
        "Comba: writes correct a learned part of the answer, queries are moved away from the key",
        "S = a S + beta k (v - b S^T k)^T, o = S^T (q - d k)",
        f"Hu et al. 2025 (Comba), by {PDN}, table 2",
    ),
}
register_variants(DeltaNet, DELTA, VARIANTS)


@dataclass(frozen=True, kw_only=True)
class ElementwiseLonghornOptions(MemoryOptions):
    """Options of `ElementwiseLonghorn`: those of `MemoryOptions`, with keys of any length."""

    normalize_qk: bool = option(False, check_flag)


@register_mixer(
    "longhorn-elementwise",
    summary="Longhorn's diagonal form: every element of the memory corrects itself, one gain per value channel",
    equation="S_kv = S_kv + e_v k_k (v_v - k_k S_kv), e = beta / (1 + beta |k|^2)",
    source="Liu et al. 2024 (Longhorn); Palimpsa, table 1",
    cost="10 H K V",
)
class ElementwiseLonghorn(MemoryLayer):
    r"""A sequence mixer in which every element of the memory corrects its own error.

    $$S_t = \Big(1 - k_t^2 \epsilon_t^\top\Big) \odot S_{t-1} + k_t (\epsilon_t \odot v_t)^\top, \qquad
      \epsilon_t = \frac{\beta_t}{1 + \beta_t |k_t|^2}, \qquad o_t = S_t^\top q_t$$

    with beta the sigmoid of a projection of rank hidden_size / 16, one number per value channel. Longhorn (Liu et al. 2024) with
    its diagonal approximation, as Palimpsa's table 1 compares it; the mixer `longhorn` has the full rule with one beta per head.
    See `fastweights.ops.elementwise_longhorn`.

    Args:
        normalize_qk: whether queries and keys are divided by their length; not by default.

    The other options are those of `MemoryOptions`.
    """

    Options = ElementwiseLonghornOptions
    op = elementwise_longhorn
    decodes_in_pool = True
    options: ElementwiseLonghornOptions
    probes = {**MemoryLayer.probes, "beta": ""}

    def build(self) -> None:
        rank, channels = max(1, self.hidden_size // 16), self.heads.value_heads * self.heads.value
        self.beta_proj = nn.Sequential(
            nn.Linear(self.hidden_size, rank, bias=False), nn.Linear(rank, channels, bias=False)
        )

    def input_products(self) -> InputProducts:
        return plain_products(self.beta_proj)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        beta_BTGV = torch.sigmoid(at_least_float32(project(x_BTD, self.beta_proj))).view_as(v_BTGV)
        self.probe(beta=lambda: compute_write_gain(k_BTHK, beta_BTGV))
        return run(self.op, q_BTHK, k_BTHK, v_BTGV, beta_BTGV)


def compute_write_gain(k_BTHK: Tensor, beta_BTGV: Tensor) -> Tensor:
    """e = beta / (1 + beta |k|^2), [B, T, G, V]."""
    length = at_least_float32(k_BTHK).square().sum(-1, keepdim=True)
    return beta_BTGV / (1 + beta_BTGV * expand_heads(length, beta_BTGV.shape[2]))
