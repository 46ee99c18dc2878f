"""Palimpsa-D layer: gated linear attention on Gated DeltaNet's layout, with an importance for every association."""

from __future__ import annotations

from torch import Tensor

from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input, check_number, check_positive
from .cache import LayerCache
from .decay import HeadDecay
from .gates import ImportanceGain, SigmoidGain
from .heads import HeadSizes
from .mixer import Mixer
from .norms import at_least_float32
from .posterior import read_posterior
from .projections import OutputProjection, QKVProjection, ValueSkip

__all__ = ["PalimpsaD"]


class PalimpsaD(Mixer):
    r"""A sequence mixer whose memory knows how sure it is of each association.

    $$M_t = a_t M_{t-1} + k_t (s_t v_t)^\top, \qquad J_t = a_t J_{t-1} + k_t^2 \beta_t^\top, \qquad
      o_t = \Big(\frac{M_t}{J_t + p}\Big)^\top q_t + D v_t$$

    with $s_t$ the sigmoid of a projection, one number a head, and
    $\beta_t = \mathrm{sigmoid}(W_2 W_1 x_t)\, \mathrm{softplus}(b)\, s_t$, one a value channel. What many keys have written to
    has a high importance J + p and is rewritten slowly (metaplasticity). Projections, convolutions, decay, unit q and k and
    the gated norm are Gated DeltaNet's; there is no delta rule. Palimpsa, sections 2.3 and 2.4, appendix A.1. Without
    metaplasticity J is 0: gated linear attention, and b -> -inf gives the same.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        metaplasticity: whether importances are kept; without them the layer has no beta.
        prior: p, importance before any key, positive. Without metaplasticity it still divides the answer.
        b_scale: first value of b, one learned number a head.
        gain: "beta" (s as above) or None (s = 1).
        residual: whether D v, with v before s and a learned D a head, is added to the answer.
        long_memory: whether the first decays are those of the paper's recall task (A from 0.01 to 0.16 and dt from 1e-3 to
            1e-1 over the heads) and not Mamba-2's (A uniform in [0, 16], dt log-uniform).
        normalize_qk: whether queries and keys are divided by their length.
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        activation: after them, "silu" or "none".
        output_gate: None, "silu", "sigmoid" or "gelu": a gate on the normalised answer.
        gate_low_rank: whether that gate is projected through V dimensions.
        norm_eps: of the RMSNorm on the answer.
        backend: of the op, see `fastweights.ops.palimpsa`.

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
        metaplasticity: bool = True,
        prior: float = 1.0,
        b_scale: float = 1.0,
        gain: str | None = "beta",
        residual: bool = True,
        long_memory: bool = False,
        normalize_qk: bool = True,
        conv_size: int | None = 4,
        activation: str = "silu",
        output_gate: str | None = "silu",
        gate_low_rank: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        heads = HeadSizes.choose(hidden_size, num_heads, head_dim, expand_v, num_v_heads)
        check_flag("metaplasticity", metaplasticity)
        check_number("b_scale", b_scale)
        check_choice("gain", gain, (None, "beta"))
        check_choice("backend", backend, BACKENDS)
        self.hidden_size = hidden_size
        self.heads = heads
        self.prior = check_positive("prior", prior)
        self.backend = backend
        self.normalize_qk = check_flag("normalize_qk", normalize_qk)
        self.qkv = QKVProjection(hidden_size, heads, conv_size, activation, self.normalize_qk, backend)
        self.decay = HeadDecay(hidden_size, heads.value_heads, check_flag("long_memory", long_memory))
        self.gain = SigmoidGain(hidden_size, heads.value_heads) if gain else None
        self.importance = (
            ImportanceGain(hidden_size, heads.value_heads, heads.value, b_scale) if metaplasticity else None
        )
        self.skip = ValueSkip(heads.value_heads) if check_flag("residual", residual) else None
        self.output = OutputProjection(hidden_size, heads, output_gate, gate_low_rank, norm_eps, backend)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        s_BTG1 = 1 if self.gain is None else self.gain(x_BTD)[..., None]
        o_BTGV, memory = read_posterior(
            q_BTHK, k_BTHK, (at_least_float32(v_BTGV) * s_BTG1).to(v_BTGV.dtype),
            None if self.importance is None else self.importance(x_BTD) * s_BTG1, self.decay(x_BTD),
            prior=self.prior, scale=self.heads.key**-0.5, memory=held.memory,
            output_final_state=cache is not None, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        if cache is not None:
            cache.update(memory, windows)
        return self.output(o_BTGV if self.skip is None else self.skip(o_BTGV, v_BTGV), x_BTD)

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * self.heads.value * (1 if self.importance is None else 2)
