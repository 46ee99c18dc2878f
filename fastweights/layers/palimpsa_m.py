"""Palimpsa-M layer, and Mamba-2 without its metaplasticity: one projection, one convolution, a gated norm over all heads."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops.framework.run import BACKENDS
from ._checks import check_choice, check_flag, check_input, check_number, check_positive, check_size
from .cache import LayerCache
from .convolution import ShortConvolution
from .decay import StepDecay
from .gates import ImportanceGain
from .heads import HeadSizes, head_width
from .initialization import ResidualProjection
from .mixer import Mixer
from .norms import GroupedRMSNorm, at_least_float32
from .posterior import read_posterior
from .projections import GATES, ValueSkip, backend_beside

__all__ = ["PalimpsaM"]


class PalimpsaM(Mixer):
    r"""Mamba-2's block around a memory that knows how sure it is of each association.

    $$M_t = a_t M_{t-1} + k_t (dt_t v_t)^\top, \qquad J_t = a_t J_{t-1} + k_t^2 \beta_t^\top, \qquad
      o_t = \Big(\frac{M_t}{J_t + p}\Big)^\top q_t + D v_t$$

    with $a_t = \exp(-A\, dt_t)$ and $\beta_t = \mathrm{sigmoid}(W_2 W_1 x_t)\, \mathrm{softplus}(b)\, dt_t$. One projection
    gives the gate z, v (Mamba-2's x), k (its B), q (its C) and the steps dt, in this order; one convolution with SiLU goes
    over v, k and q, which are not normalised. The answer is multiplied by silu(z), normalised and projected. Palimpsa,
    section 2.4 and appendix A.1. Without metaplasticity J is 0 and this is Mamba-2 (Dao and Gu 2024), the `Mamba2Mixer` of
    transformers up to rounding; b -> -inf gives the same.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: heads of v, dt and the memory (Mamba-2's heads).
        head_dim: key channels K of a head (Mamba-2's state size); hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K (Mamba-2's head_dim); the paper takes 2.
        num_groups: heads of q and k, a divisor of num_heads: each serves num_heads / num_groups memories in a row. num_heads
            when None.
        metaplasticity: whether importances are kept; without them the layer has no beta.
        prior: p, importance before any key, positive. Without metaplasticity it still divides the answer.
        b_scale: first value of b, one learned number a head.
        residual: whether D v, with a learned D a head, is added to the answer.
        long_memory: whether the first A and dt are those of the paper's recall task (A from 0.01 to 0.16 and dt from 1e-3 to
            1e-1 over the heads) and not Mamba-2's (A uniform in [0, 16], dt log-uniform).
        dt_min, dt_max: limits of dt; none above when None.
        conv_size: width of the convolution.
        conv_bias: whether the convolution has a bias.
        bias: whether the first and the last projection have one.
        output_gate: z's function, "silu", "sigmoid" or "gelu"; None for no gate.
        norm_groups: in how many equal groups the channels of all heads are normalised.
        norm_eps: of that RMSNorm.
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
        num_groups: int | None = None,
        metaplasticity: bool = True,
        prior: float = 1.0,
        b_scale: float = 1.0,
        residual: bool = True,
        long_memory: bool = False,
        dt_min: float = 0.0,
        dt_max: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        output_gate: str | None = "silu",
        norm_groups: int = 1,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_groups = num_heads if num_groups is None else check_size("num_groups", num_groups)
        width = head_width(hidden_size, num_heads, head_dim)
        if num_heads % num_groups:
            raise ValueError(f"num_groups must divide num_heads, {num_heads}, got {num_groups}")
        heads = HeadSizes.choose(hidden_size, num_groups, width, expand_v, num_heads)
        inner, keys = heads.value_heads * heads.value, heads.key_heads * heads.key
        if inner % check_size("norm_groups", norm_groups):
            raise ValueError(f"norm_groups must divide the {inner} channels of all heads, got {norm_groups}")
        if check_number("dt_min", dt_min) < 0:
            raise ValueError(f"dt_min must be at least 0, got {dt_min}")
        if dt_max is not None and check_number("dt_max", dt_max) <= dt_min:
            raise ValueError(f"dt_max must be above dt_min, {dt_min}, got {dt_max}; None is no limit")
        check_choice("output_gate", output_gate, (None, *GATES))
        check_flag("metaplasticity", metaplasticity)
        check_choice("backend", backend, BACKENDS)
        self.hidden_size = hidden_size
        self.heads = heads
        self.prior = check_positive("prior", prior)
        self.gate = output_gate
        self.backend = backend
        self.widths = [inner if output_gate else 0, inner + 2 * keys, num_heads]
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=check_flag("bias", bias))
        check_size("conv_size", conv_size)
        self.conv = ShortConvolution(inner + 2 * keys, conv_size, bias=check_flag("conv_bias", conv_bias))
        self.decay = StepDecay(num_heads, dt_min, dt_max, check_flag("long_memory", long_memory))
        check_number("b_scale", b_scale)
        self.importance = ImportanceGain(hidden_size, num_heads, heads.value, b_scale) if metaplasticity else None
        self.skip = ValueSkip(num_heads) if check_flag("residual", residual) else None
        self.norm = GroupedRMSNorm(inner, norm_groups, eps=check_positive("norm_eps", norm_eps))
        self.out_proj = ResidualProjection(inner, hidden_size, bias=bias)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        beside = backend_beside(self.backend)
        z, vkq, step_BTG = self.in_proj(x_BTD).split(self.widths, 2)
        vkq, window = self.conv(
            vkq, held.context.get("vkq"), cu_seqlens, activation="silu", keep_window=cache is not None, backend=beside
        )
        v_BTGV, k_BTHK, q_BTHK = self._split(vkq)
        dt_BTG, g_BTG = self.decay(step_BTG)
        o_BTGV, memory = read_posterior(
            q_BTHK, k_BTHK, (at_least_float32(v_BTGV) * dt_BTG[..., None]).to(v_BTGV.dtype),
            None if self.importance is None else self.importance(x_BTD) * dt_BTG[..., None], g_BTG,
            prior=self.prior, scale=1.0, memory=held.memory,
            output_final_state=cache is not None, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        if cache is not None and window is not None:
            cache.update(memory, {"vkq": window})
        o = (o_BTGV if self.skip is None else self.skip(o_BTGV, v_BTGV)).flatten(2)
        return self.out_proj(self.norm(o, None if self.gate is None else z, self.gate or "silu", beside))

    def _split(self, vkq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v [B, T, G, V], k and q [B, T, H, K] of the channels that the convolution goes over."""
        heads = self.heads
        keys = heads.key_heads * heads.key
        v, k, q = vkq.split([heads.value_heads * heads.value, keys, keys], 2)
        return v.unflatten(2, (-1, heads.value)), k.unflatten(2, (-1, heads.key)), q.unflatten(2, (-1, heads.key))

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * self.heads.value * (1 if self.importance is None else 2)
