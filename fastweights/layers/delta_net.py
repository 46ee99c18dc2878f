"""DeltaNet layer: error-correcting memory with decay, gain and key preconditioner as independent options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checks import check_flag, check_number
from ..ops import delta_rule, precondition_keys, preconditioned_delta_rule
from .decay import HeadDecay, KimiDecay
from .gates import PreconditionerGates, SigmoidGain
from .initialization import OwnInitialValues
from .memory_layer import MemoryLayer, RuleCall
from .norms import at_least_float32
from .options import DecayOptions, MemoryOptions, one_of, option
from .registry import DELTA, KEY_ENERGY, KEY_SCALES, MATRIX, MATRIX_AND_ENERGY, PDN, register_mixer

__all__ = ["DeltaNet", "DeltaNetOptions"]

# The gain of a write from beta, the overlap m = k.w of the key read with the key written, and the decay a.
GAINS = {
    "beta": lambda beta, m, a: beta,
    "longhorn": lambda beta, m, a: beta / (1 + beta * m),
    "fading": lambda beta, m, a: beta / (a + beta * m).clamp_min(1e-6),
    "unit": lambda beta, m, a: beta / m.clamp_min(1e-6),
    "damped": lambda beta, m, a: beta / (1 + m),
}
# The factors of a write key lie in [1/x, x], [1, x] or [1/x, 1]: powers of x^(1/2) times this power of x in the last two.
INTERVALS = {"symmetric": 0.0, "amplify": 0.5, "dampen": -0.5}


def check_bound(name: str, value: object) -> float:
    """The check of the preconditioner's bound."""
    if not 1 <= check_number(name, value) <= 2:
        raise ValueError(f"{name} must be in [1, 2], beyond which the memory can grow without end, got {value}")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DeltaNetOptions(DecayOptions, MemoryOptions):
    """Options of `DeltaNet`, whose docstring explains them."""

    decay: str = option("none", one_of("none", "head", "channel"))
    gain: str = option("beta", one_of(*GAINS))
    negative_eigenvalues: bool = option(False, check_flag)
    preconditioner: str | None = option(None, one_of(None, "key"))
    tie_preconditioner: bool = option(False, check_flag)
    bound: float = option(1.5, check_bound)
    interval: str = option("symmetric", one_of(*INTERVALS))
    center: float = option(-0.2, check_number)

    def check_together(self) -> None:
        super().check_together()
        if self.gain == "fading" and self.decay == "channel":
            raise ValueError("gain must not be 'fading' with decay 'channel': it takes one decay per head")
        if self.tie_preconditioner and self.decay == "channel":
            raise ValueError("tie_preconditioner must be False with decay 'channel': A has one decay per head")
        if self.negative_eigenvalues and self.preconditioner and self.bound > 1 and self.interval != "dampen":
            raise ValueError(
                f"negative_eigenvalues must be False with a preconditioner of bound {self.bound}: beta * bound would exceed "
                "2 and the memory could grow without end; choose one of the two, or interval 'dampen'"
            )


class KeyPreconditioner(OwnInitialValues):
    """Gates, centre (one number per head, free in sign), bound and factor that turn keys into write keys."""

    _no_weight_decay = ("center",)

    def __init__(
        self, hidden_size: int, num_heads: int, tied: bool, bound: float, interval: str, center: float
    ) -> None:
        super().__init__()
        self.bound = bound if interval == "symmetric" else bound**0.5
        self.factor = bound ** INTERVALS[interval]
        self.first_center = center
        self.gates = PreconditionerGates(hidden_size, num_heads, tied)
        self.center = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"center": torch.full_like(self.center, self.first_center)}


@register_mixer(
    "deltanet",
    summary="delta rule: corrects what the memory answers to a key",
    equation="S = S + beta k (v - S^T k)^T",
    source="Schlag et al. 2021; Yang et al. 2024 (DeltaNet)",
    state=MATRIX,
    cost=f"H ({DELTA})",
)
class DeltaNet(MemoryLayer):
    r"""A sequence mixer whose memory corrects its own answer to each key.

    $$S' = \mathrm{Diag}(a_t) S_{t-1}, \qquad S_t = S' + \beta_t w_t (v_t - S'^\top k_t)^\top, \qquad o_t = S_t^\top q_t$$

    DeltaNet, Gated DeltaNet, Kimi Delta Attention and, with the preconditioner, PDN, PGDN and PKDA (Preconditioned DeltaNet,
    sections 3.5 and 4.2, appendix E); Longhorn by its gain. Without the preconditioner w = k.

    Args:
        decay: "none", "head" (one decay per head, Gated DeltaNet) or "channel" (one per key channel, Kimi Linear).
        gain: factor of the write: "beta" = sigmoid of a projection; or from it and m = k.w "longhorn" = beta/(1 + beta m)
            (Longhorn), "fading" = beta/(a + beta m) with the decay a of the head, "unit" = beta/m and "damped" =
            beta/(1 + m): write keys normalised as in Preconditioned DeltaNet, table 7, which finds "beta" best.
        negative_eigenvalues: whether beta reaches 2 instead of 1, so that a write can flip the sign of what it replaces.
        preconditioner: None, or "key": w = k times a power of the bound, see `fastweights.ops.precondition_keys`.
        tie_preconditioner: whether its A decays and gains as the memory does; otherwise it has projections of its own.
        bound: x in [1, 2]; 1 leaves the keys as they are.
        interval: where the factors of the write key lie: "symmetric" [1/x, x], "amplify" [1, x] or "dampen" [1/x, 1], which the
            paper's appendix E.3 finds worse.
        center: first value of the learned centre of log A.
        normalize_qk: whether queries and keys are divided by their length; unit keys keep gain "beta" stable.

    The other options are those of `DecayOptions` (long_memory) and `MemoryOptions`.
    """

    Options = DeltaNetOptions
    options: DeltaNetOptions
    probes = {
        **MemoryLayer.probes,
        "g": "decay",
        "beta": "",
        "write_key": "preconditioner",
        "precond_g": "preconditioner",
        "precond_beta": "preconditioner",
    }

    def build(self) -> None:
        options, heads, hidden_size = self.options, self.heads, self.hidden_size
        self.gain = SigmoidGain(hidden_size, heads.value_heads, largest=2.0 if options.negative_eigenvalues else 1.0)
        self.decay: nn.Module | None = None
        if options.decay == "head":
            self.decay = HeadDecay(hidden_size, heads.value_heads, options.long_memory)
        elif options.decay == "channel":
            self.decay = KimiDecay(hidden_size, heads.value_heads, heads.key, options.long_memory)
        self.preconditioner = None
        if options.preconditioner:
            self.preconditioner = KeyPreconditioner(
                hidden_size, heads.value_heads, options.tie_preconditioner, options.bound, options.interval, options.center
            )  # fmt: skip

    def rule(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        beta_BTG = self.gain(x_BTD)
        g = None if self.decay is None else self.decay(x_BTD)
        self.probe(g=g)
        if self.preconditioner is None:
            beta_BTG = self._gain_of_writes(beta_BTG, k_BTHK, k_BTHK, g)
            self.probe(beta=beta_BTG)
            return run(delta_rule, q_BTHK, k_BTHK, v_BTGV, beta_BTG, g, state=("S",))

        center, bound, factor = self.preconditioner.center, self.preconditioner.bound, self.preconditioner.factor
        precond_g, precond_beta = self.preconditioner.gates(x_BTD, g, beta_BTG)
        self.probe(precond_g=precond_g, precond_beta=precond_beta)

        def write_keys() -> tuple[Tensor, dict[str, Tensor | None]]:
            w_BTGK, memory = run(precondition_keys, k_BTHK, precond_g, precond_beta, center, bound=bound, state=("A",))
            return factor * w_BTGK, memory

        if self.options.gain == "beta":
            self.probe(beta=beta_BTG, write_key=lambda: write_keys()[0])
            return run(
                preconditioned_delta_rule, q_BTHK, k_BTHK, v_BTGV, factor * beta_BTG, g, precond_g=precond_g,
                precond_beta=precond_beta, center=center, bound=bound, state=("S", "A"),
            )  # fmt: skip
        w_BTGK, energy = write_keys()  # the gain needs them first
        beta_BTG = self._gain_of_writes(beta_BTG, k_BTHK, w_BTGK, g)
        self.probe(beta=beta_BTG, write_key=w_BTGK)
        o_BTGV, memory = run(delta_rule, q_BTHK, k_BTHK, v_BTGV, beta_BTG, g, write_key=w_BTGK, state=("S",))
        return o_BTGV, {**memory, **energy}

    def _gain_of_writes(self, beta_BTG: Tensor, k_BTHK: Tensor, w: Tensor, g: Tensor | None) -> Tensor:
        """The factor of each write. w: write keys [B, T, H or G, K]."""
        if self.options.gain == "beta":
            return beta_BTG
        if w.shape[2] != k_BTHK.shape[2]:
            k_BTHK = k_BTHK.repeat_interleave(w.shape[2] // k_BTHK.shape[2], 2)
        m = (at_least_float32(k_BTHK) * at_least_float32(w)).sum(-1)
        m_BTG = m.repeat_interleave(beta_BTG.shape[2] // m.shape[2], 2)
        return GAINS[self.options.gain](beta_BTG, m_BTG, 1.0 if g is None else g.exp())

    def state_size(self, length: int = 1) -> int:
        channels = self.heads.value + (self.preconditioner is not None)
        return self.heads.value_heads * self.heads.key * channels


KIMI_GATE = {"output_gate": "sigmoid", "gate_low_rank": True}

register_mixer(
    "gdn",
    layer=DeltaNet,
    options={"decay": "head"},
    summary="gated DeltaNet: delta rule with one decay per head",
    equation="S' = a S, S = S' + beta k (v - S'^T k)^T",
    source="Yang et al. 2025 (Gated DeltaNet), section 3",
    state=MATRIX,
    cost=f"H ({DELTA})",
)
register_mixer(
    "kda",
    layer=DeltaNet,
    options={"decay": "channel", **KIMI_GATE},
    summary="Kimi delta attention: delta rule with one decay per key channel",
    equation="S' = Diag(a) S, S = S' + beta k (v - S'^T k)^T",
    source="Kimi Team 2025 (Kimi Linear), section 3",
    state=MATRIX,
    cost=f"H ({DELTA})",
)
register_mixer(
    "pdn",
    layer=DeltaNet,
    options={"preconditioner": "key"},
    summary="preconditioned DeltaNet: quiet key channels are written more strongly",
    equation=f"S = S + beta w (v - S^T k)^T, {KEY_ENERGY}, w = x^(-r/(1+|r|)) k, r = log A - c",
    source=f"{PDN}, section 3.5",
    state=MATRIX_AND_ENERGY,
    cost=f"H ({DELTA} + {KEY_SCALES})",
)
register_mixer(
    "pgdn",
    layer=DeltaNet,
    options={"decay": "head", "preconditioner": "key"},
    summary="preconditioned gated DeltaNet",
    equation=f"S' = a S, S = S' + beta w (v - S'^T k)^T, {KEY_ENERGY}, w as in pdn",
    source=f"{PDN}, section 3.5",
    state=MATRIX_AND_ENERGY,
    cost=f"H ({DELTA} + {KEY_SCALES})",
)
register_mixer(
    "pkda",
    layer=DeltaNet,
    options={"decay": "channel", "preconditioner": "key", **KIMI_GATE},
    summary="preconditioned Kimi delta attention",
    equation=f"S' = Diag(a) S, S = S' + beta w (v - S'^T k)^T, {KEY_ENERGY}, w as in pdn",
    source=f"{PDN}, section 3.5",
    state=MATRIX_AND_ENERGY,
    cost=f"H ({DELTA} + {KEY_SCALES})",
)
register_mixer(
    "longhorn",
    layer=DeltaNet,
    options={"gain": "longhorn", "normalize_qk": False},
    summary="Longhorn: the delta rule's implicit step, stable for keys of any length",
    equation="S = S + beta/(1 + beta |k|^2) k (v - S^T k)^T",
    source="Liu et al. 2024 (Longhorn), section 3",
    state=MATRIX,
    cost=f"H ({DELTA})",
)
