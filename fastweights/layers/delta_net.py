"""DeltaNet layer: error-correcting memory with decay, gain and key preconditioner as independent options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import delta_rule, precondition_keys, preconditioned_delta_rule
from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input, check_number
from .cache import LayerCache
from .decay import HeadDecay, KimiDecay
from .gates import PreconditionerGates, SigmoidGain
from .heads import HeadSizes
from .initialization import OwnInitialValues
from .mixer import Mixer
from .norms import at_least_float32
from .projections import OutputProjection, QKVProjection

__all__ = ["DeltaNet"]

# The gain of a write from beta, m = k.w, the overlap of the key read with the key written, and the decay a.
GAINS = {
    "beta": lambda beta, m, a: beta,
    "longhorn": lambda beta, m, a: beta / (1 + beta * m),
    "fading": lambda beta, m, a: beta / (a + beta * m).clamp_min(1e-6),
    "unit": lambda beta, m, a: beta / m.clamp_min(1e-6),
    "damped": lambda beta, m, a: beta / (1 + m),
}
# The factors of a write key lie in [1/x, x], [1, x] or [1/x, 1]: powers of x^(1/2) times this power of x in the last two.
INTERVALS = {"symmetric": 0.0, "amplify": 0.5, "dampen": -0.5}


class KeyPreconditioner(OwnInitialValues):
    """Gates, centre (one number a head, free in sign), bound and factor that turn keys into write keys."""

    _no_weight_decay = ("center",)

    def __init__(
        self, hidden_size: int, num_heads: int, tied: bool, bound: float, interval: str, center: float
    ) -> None:
        super().__init__()
        self.bound = bound if interval == "symmetric" else bound**0.5
        self.factor = bound ** INTERVALS[interval]
        self.first_center = check_number("center", center)
        self.gates = PreconditionerGates(hidden_size, num_heads, tied)
        self.center = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"center": torch.full_like(self.center, self.first_center)}


class DeltaNet(Mixer):
    r"""A sequence mixer whose memory corrects its own answer to each key.

    $$S' = \mathrm{Diag}(a_t) S_{t-1}, \qquad S_t = S' + \beta_t w_t (v_t - S'^\top k_t)^\top, \qquad o_t = S_t^\top q_t$$

    DeltaNet, Gated DeltaNet, Kimi Delta Attention and, with the preconditioner, PDN, PGDN and PKDA (Preconditioned DeltaNet,
    sections 3.5 and 4.2, appendix E); Longhorn by its gain. Without the preconditioner w = k.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        decay: "none", "head" (one number a head, Gated DeltaNet) or "channel" (one a key channel, Kimi Linear).
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
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        activation: after them, "silu" or "none".
        output_gate: None, "silu" or "sigmoid": a gate on the normalised answer.
        gate_low_rank: whether that gate is projected through V dimensions.
        norm_eps: of the RMSNorm on the answer.
        backend: of the ops, see `fastweights.ops.delta_rule`.

    Raises:
        ValueError: an option that does not fit.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        decay: str = "none",
        gain: str = "beta",
        negative_eigenvalues: bool = False,
        preconditioner: str | None = None,
        tie_preconditioner: bool = False,
        bound: float = 1.5,
        interval: str = "symmetric",
        center: float = -0.2,
        normalize_qk: bool = True,
        conv_size: int | None = 4,
        activation: str = "silu",
        output_gate: str | None = None,
        gate_low_rank: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        heads = HeadSizes.choose(hidden_size, num_heads, head_dim, expand_v, num_v_heads)
        check_choice("decay", decay, ("none", "head", "channel"))
        check_choice("gain", gain, tuple(GAINS))
        check_choice("preconditioner", preconditioner, (None, "key"))
        check_flag("tie_preconditioner", tie_preconditioner)
        check_flag("negative_eigenvalues", negative_eigenvalues)
        if not 1 <= check_number("bound", bound) <= 2:
            raise ValueError(f"bound must be in [1, 2], beyond which the memory can grow without end, got {bound}")
        check_choice("interval", interval, tuple(INTERVALS))
        if gain == "fading" and decay == "channel":
            raise ValueError("gain must not be 'fading' with decay 'channel': it takes one decay a head")
        if tie_preconditioner and decay == "channel":
            raise ValueError("tie_preconditioner must be False with decay 'channel': A has one decay a head")
        if negative_eigenvalues and preconditioner and bound > 1 and interval != "dampen":
            raise ValueError(
                f"negative_eigenvalues must be False with a preconditioner of bound {bound}: beta * bound would exceed 2 "
                "and the memory could grow without end; choose one of the two, or interval 'dampen'"
            )
        self.hidden_size = hidden_size
        self.heads = heads
        self.gain_rule = gain
        check_choice("backend", backend, BACKENDS)
        self.backend = backend
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        self.qkv = QKVProjection(hidden_size, heads, conv_size, activation, self.normalize_qk, backend)
        self.gain = SigmoidGain(hidden_size, heads.value_heads, largest=2.0 if negative_eigenvalues else 1.0)
        self.decay: nn.Module | None = None
        if decay == "head":
            self.decay = HeadDecay(hidden_size, heads.value_heads)
        elif decay == "channel":
            self.decay = KimiDecay(hidden_size, heads.value_heads, heads.key)
        self.preconditioner = (
            KeyPreconditioner(hidden_size, heads.value_heads, tie_preconditioner, bound, interval, center)
            if preconditioner
            else None
        )
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        beta_BTG = self.gain(x_BTD)
        g = self.decay(x_BTD) if self.decay is not None else None
        S, A = held.memory.get("S"), held.memory.get("A")
        call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": self.backend}
        call["output_final_state"] = cache is not None

        if self.preconditioner is None:
            beta_BTG = self._gain(beta_BTG, k_BTHK, k_BTHK, g)
            o_BTGV, S = delta_rule(q_BTHK, k_BTHK, v_BTGV, beta_BTG, g, initial_state=S, **call)
        else:
            center, bound = self.preconditioner.center, self.preconditioner.bound
            precond_g, precond_beta = self.preconditioner.gates(x_BTD, g, beta_BTG)
            factor = self.preconditioner.factor
            if self.gain_rule == "beta":
                o_BTGV, state = preconditioned_delta_rule(
                    q_BTHK, k_BTHK, v_BTGV, factor * beta_BTG, g, precond_g=precond_g, precond_beta=precond_beta, center=center,
                    bound=bound, initial_state=None if S is None or A is None else (S, A), **call,
                )  # fmt: skip
                S, A = state or (None, None)
            else:  # the gain needs the write key first
                w_BTGK, A = precondition_keys(
                    k_BTHK, precond_g, precond_beta, center, bound=bound, initial_state=A, **call
                )
                w_BTGK = factor * w_BTGK
                beta_BTG = self._gain(beta_BTG, k_BTHK, w_BTGK, g)
                o_BTGV, S = delta_rule(q_BTHK, k_BTHK, v_BTGV, beta_BTG, g, write_key=w_BTGK, initial_state=S, **call)
        if cache is not None:
            cache.update({"S": S, "A": A}, windows)
        return self.output(o_BTGV, x_BTD)

    def _gain(self, beta_BTG: Tensor, k_BTHK: Tensor, w: Tensor, g: Tensor | None) -> Tensor:
        """The factor of the write. w: write keys [B, T, H or G, K]."""
        if self.gain_rule == "beta":
            return beta_BTG
        if w.shape[2] != k_BTHK.shape[2]:
            k_BTHK = k_BTHK.repeat_interleave(w.shape[2] // k_BTHK.shape[2], 2)
        m = (at_least_float32(k_BTHK) * at_least_float32(w)).sum(-1)
        m_BTG = m.repeat_interleave(beta_BTG.shape[2] // m.shape[2], 2)
        return GAINS[self.gain_rule](beta_BTG, m_BTG, 1.0 if g is None else g.exp())

    def state_size(self, length: int = 1) -> int:
        channels = self.heads.value + (self.preconditioner is not None)
        return self.heads.value_heads * self.heads.key * channels
