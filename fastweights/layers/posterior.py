"""Palimpsa-D, Palimpsa-M and Mamba-2: a memory with importances or, without metaplasticity, linear attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_flag, check_number, check_positive, check_size
from ..ops import linear_attention, palimpsa, palimpsa_posterior
from ..ops.authoring import Op, State, gated_writes, importance_writes, multiply_rows
from .cache import LayerCache
from .decay import HeadDecay, StepDecay
from .gates import ImportanceGain, SigmoidGain, VarianceShift, WindowThreshold
from .heads import HeadSizes
from .initialization import ResidualProjection
from .memory_layer import Answer, MemoryLayer, OpLayer, RuleCall
from .mixer import check_input
from .norms import GroupedRMSNorm
from .options import (
    LONGEST_CONVOLUTION,
    BlockOptions,
    DecayOptions,
    MemoryOptions,
    at_least_zero,
    one_of,
    option,
    up_to,
)
from .parts import HeadPart
from .projections import GATES, ShortConvolution, ValueSkip, choose_layer_backend, convolve_together
from .registry import ADDITIVE, register_mixer
from .shared_input import InputProducts, compute_gates, joins_norm, plain_products, project
from .wrapped import is_bare

__all__ = ["PosteriorOptions", "PalimpsaD", "PalimpsaM", "PalimpsaMOptions"]


def number_or_interval(name: str, value: object) -> float | tuple[float, float]:
    """The check that an option is a finite number, or two in rising order."""
    if not isinstance(value, (list, tuple)):
        return check_number(name, value)
    if len(value) != 2 or not check_number(name, value[0]) < check_number(name, value[1]):
        raise ValueError(f"{name} must be a number or [low, high] with low below high, got {value}")
    return float(value[0]), float(value[1])


@dataclass(frozen=True, kw_only=True)
class PosteriorOptions(DecayOptions):
    """Options of both Palimpsa layers.

    Args:
        metaplasticity: whether importances are kept; without them the layer has no beta.
        prior: p, importance before any key, positive. Without metaplasticity it still divides the answer.
        b_scale: first value of b, one learned number per head; or [low, high], between which each head draws its own.
        beta_init: first values of the second matrix of beta's projection, "normal" as a model draws all matrices, or "uniform"
            in +-1/sqrt(rank) as in the authors' released code. A layer by itself has the latter.
        residual: whether D v, with one learned D per head, is added to the answer.
        skip_init: first value of D. At Mamba-2's 1, D v outweighs the answers of the memory at the start, and recall is learnt
            late or never (docs/rules.md).
        metaplastic_threshold: first value of a learned threshold per head on the mean of log N over the tokens so far, with the
            memory window N = 1/(1 - a): importances are kept only above it (Palimpsa, section 3.2). None keeps them everywhere.
        variance_gate: whether the output gate is shifted by the variance of the answer, by one learned number per head.
    """

    metaplasticity: bool = option(True, check_flag)
    prior: float = option(1.0, check_positive)
    b_scale: float | Sequence[float] = option(1.0, number_or_interval)
    beta_init: str = option("normal", one_of("normal", "uniform"))
    residual: bool = option(True, check_flag)
    skip_init: float = option(0.0, check_number)
    metaplastic_threshold: float | None = option(None, check_number)
    variance_gate: bool = option(False, check_flag)

    def check_together(self) -> None:
        super().check_together()
        if not self.metaplasticity and (self.metaplastic_threshold is not None or self.variance_gate):
            raise ValueError(
                "metaplasticity must be True with metaplastic_threshold or variance_gate, got False: both are about importances"
            )
        if self.variance_gate and getattr(self, "output_gate", None) is None:
            raise ValueError("output_gate must not be None with variance_gate, which shifts it; choose 'silu'")


class PosteriorLayer(OpLayer):
    """A layer whose memory is that of `fastweights.ops.palimpsa`, or of `linear_attention` without metaplasticity."""

    options: PosteriorOptions

    @classmethod
    def choose_op(cls, options: Any) -> Op[..., Any]:
        return palimpsa if options.metaplasticity else linear_attention

    @classmethod
    def states(cls, options: Any) -> Mapping[str, State]:
        states = cls.choose_op(options).spec.states
        return states if options.metaplastic_threshold is None else {**states, **WindowThreshold.states}

    def build_importance(self) -> None:
        """Create the gain of the importance, its threshold, the shift of the gate and the skip D v, each None where the options
        leave it out."""
        options, heads = self.options, self.heads
        self.importance = None
        if options.metaplasticity:
            self.importance = ImportanceGain(
                self.hidden_size, heads.value_heads, heads.value, options.b_scale, options.beta_init
            )
        self.skip = ValueSkip(heads.value_heads, options.skip_init) if options.residual else None
        self.threshold = self.variance = None
        if options.metaplastic_threshold is not None:
            self.threshold = WindowThreshold(heads.value_heads, options.metaplastic_threshold)
        if options.variance_gate:
            self.variance = VarianceShift(heads.value_heads, options.prior)

    def answer(
        self,
        x_BTD: Tensor,
        q: Tensor,
        k: Tensor,
        v_BTGV: Tensor,
        s_BTG: Tensor,
        g_BTG: Tensor,
        run: RuleCall,
        scale: float,
    ) -> tuple[Tensor, dict[str, Tensor | None], Tensor | None]:
        """Write s v with its gain in importance and read with q: answers [B, T, G, V], the memory after them, and the shift
        [B, T, G, V] of the output gate (None without one)."""
        importance, backend = self.importance, choose_layer_backend(run.keywords["backend"])
        windows: dict[str, Tensor | None] = {}
        if importance is None:
            write, beta = gated_writes(v_BTGV, s_BTG, backend=backend)
        elif self.threshold is None and is_bare(importance, ImportanceGain):
            z_BTGV = importance.before_sigmoid(x_BTD)
            write, beta = importance_writes(v_BTGV, s_BTG, z_BTGV, importance.b_scale, backend=backend)
        else:
            z_BTGV, c_BTG = importance(x_BTD, s_BTG)
            if self.threshold is not None:
                share_BTG, windows = self.threshold(g_BTG, run)
                c_BTG = c_BTG * share_BTG
            write, beta = gated_writes(v_BTGV, s_BTG, z_BTGV, c_BTG, backend=backend)
        self.probe(importance=beta)
        prior = self.options.prior
        if beta is None:
            return *run(linear_attention, q, k, write, g_BTG, scale=scale / prior), None
        if self.variance is None:
            o, memory = run(palimpsa, q, k, write, beta, g_BTG, prior=prior, scale=scale)
            return o, {**memory, **windows}, None
        (o, variance), memory = run(palimpsa_posterior, q, k, write, beta, g_BTG, prior=prior, scale=scale)
        return o, {**memory, **windows}, self.variance(variance, scale * q)


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

    The other options are those of `fastweights.layers.posterior.PosteriorOptions` (metaplasticity, metaplastic_threshold, prior,
    b_scale, beta_init, residual, skip_init, variance_gate; D v takes v before s), of `DecayOptions` (long_memory) and of
    `MemoryOptions`.
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

    def gates(self) -> Sequence[nn.Module | None]:
        return (self.gain, self.decay)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        s_BTG, g_BTG = compute_gates(x_BTD, *self.gates(), products=run.products)
        gate_BTG = torch.ones_like(v_BTGV[..., 0], dtype=torch.float32) if s_BTG is None else s_BTG
        self.probe(step_size=s_BTG, g=g_BTG)
        scale = self.heads.key**-0.5
        o_BTGV, memory, shift_BTGV = self.answer(x_BTD, q_BTHK, k_BTHK, v_BTGV, gate_BTG, g_BTG, run, scale)
        if shift_BTGV is not None:
            run.for_output["shift_BTGV"] = shift_BTGV
        return o_BTGV, memory


@dataclass(frozen=True, kw_only=True)
class PalimpsaMOptions(PosteriorOptions, BlockOptions):
    """Options of `PalimpsaM`, whose docstring explains them."""

    num_groups: int | None = option(None, check_size)
    dt_min: float = option(0.0, at_least_zero)
    dt_max: float | None = option(None, check_number)
    conv_size: int = option(4, up_to(LONGEST_CONVOLUTION))
    conv_bias: bool = option(True, check_flag)
    bias: bool = option(False, check_flag)
    output_gate: str | None = option("silu", one_of(None, *GATES), or_none=True)
    norm_groups: int = option(1, check_size)

    def head_sizes(self) -> HeadSizes:
        """Numbers and widths of the heads: num_groups heads of q and k, num_heads of v."""
        groups = self.num_heads if self.num_groups is None else self.num_groups
        if self.num_heads % groups:
            raise ValueError(f"num_groups must divide num_heads, {self.num_heads}, got {groups}")
        width = self.head_dim or self.hidden_size // self.num_heads
        return HeadSizes.choose(self.hidden_size, groups, width, self.expand_v, self.num_heads)

    def check_together(self) -> None:
        super().check_together()
        heads = self.head_sizes()
        if heads.value_heads * heads.value % self.norm_groups:
            raise ValueError(
                f"norm_groups must divide the {heads.value_heads * heads.value} channels of all heads, got {self.norm_groups}"
            )
        if self.dt_max is not None and self.dt_max <= self.dt_min:
            raise ValueError(f"dt_max must be above dt_min, {self.dt_min}, got {self.dt_max}; None is no limit")


@register_mixer(
    "palimpsa-m",
    summary="Palimpsa on Mamba-2's block: associations that many keys have written to are rewritten slowly",
    equation="M = a M + k (dt v)^T, J = a J + k^2 beta^T, o = (M / (J + p))^T q + D v",
    source="Palimpsa, sections 2.3 and 2.4, appendix A.1",
    cost="28 H K V",
)
class PalimpsaM(PosteriorLayer):
    r"""Mamba-2's block around a memory that keeps an importance for each of its elements.

    $$M_t = a_t M_{t-1} + k_t (dt_t v_t)^\top, \qquad J_t = a_t J_{t-1} + k_t^2 \beta_t^\top, \qquad
      o_t = \Big(\frac{M_t}{J_t + p}\Big)^\top q_t + D v_t$$

    with $a_t = \exp(-A\, dt_t)$ and $\beta_t = \mathrm{sigmoid}(W_2 W_1 x_t)\, \mathrm{softplus}(b)\, dt_t$. One projection
    gives the gate z, v (Mamba-2's x), k (its B), q (its C) and the steps dt, in this order; one convolution with SiLU is applied
    to v, k and q, which are not normalised. The answer is multiplied by silu(z), normalised and projected. Palimpsa,
    section 2.4 and appendix A.1. Without metaplasticity J is 0 and this is Mamba-2 (Dao and Gu 2024), the `Mamba2Mixer` of
    transformers up to rounding; b -> -inf gives the same.

    Args:
        num_heads: heads of v, dt and the memory (Mamba-2's heads).
        head_dim: key channels K of a head (Mamba-2's state size); hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K (Mamba-2's head_dim); 2 in the paper.
        num_groups: heads of q and k, a divisor of num_heads: each serves num_heads / num_groups consecutive memories.
            num_heads when None.
        dt_min: lower limit of dt.
        dt_max: upper limit of dt; none when None.
        conv_size: width of the convolution.
        conv_bias: whether the convolution has a bias.
        bias: whether the first and the last projection have a bias.
        output_gate: function of z, "silu", "sigmoid" or "gelu"; None for no gate.
        norm_groups: number of equal groups that the channels of all heads are normalised in.

    The other options are those of `fastweights.layers.posterior.PosteriorOptions` (metaplasticity, metaplastic_threshold, prior,
    b_scale, beta_init, residual, skip_init, variance_gate), of `DecayOptions` (long_memory) and of `BlockOptions`.
    """

    Options = PalimpsaMOptions
    serves_context_parallel = True
    decodes_in_pool = True
    options: PalimpsaMOptions
    probes = {
        **dict.fromkeys(("q", "k", "v", "o", "g", "step_size", "state"), ""),
        "importance": "importance",
        "output_gate": "options.output_gate",
    }
    head_counts = ("num_heads", "num_groups", "norm_groups")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        settings, hidden_size = self.options, self.hidden_size
        heads = self.heads = settings.head_sizes()
        inner, keys = heads.value_heads * heads.value, heads.key_heads * heads.key
        self.convolved = [inner, keys, keys]  # channels of v, k and q
        self.widths = [inner if settings.output_gate else 0, sum(self.convolved), heads.value_heads]
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=settings.bias)
        self.conv = ShortConvolution(
            sum(self.convolved), settings.conv_size, bias=settings.conv_bias, first_filters=settings.conv_init
        )
        self.decay = StepDecay(heads.value_heads, settings.dt_min, settings.dt_max, settings.long_memory)
        self.build_importance()
        self.norm = GroupedRMSNorm(inner, settings.norm_groups, eps=settings.norm_eps)
        self.out_proj = ResidualProjection(inner, hidden_size, bias=settings.bias)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(self, x_BTD, cache, cu_seqlens)
        gate, backend = self.options.output_gate, self.options.backend
        run = RuleCall(cache, cu_seqlens, backend, cp_group=self.cp_group)
        z, vkq, step_BTG = project(x_BTD, self.in_proj).split(self.widths, 2)
        (vkq,), (conv_state,) = convolve_together(
            [self.conv], [vkq], [run.context.get("vkq")], cu_seqlens, norms=[None], activation="silu", keep=cache is not None,
            backend=choose_layer_backend(backend), rows=run.rows, cp_group=self.cp_group,
        )  # fmt: skip
        v_BTGV, k_BTHK, q_BTHK = self._split(vkq)
        dt_BTG, g_BTG = self.decay(step_BTG)
        self.probe(q=q_BTHK, k=k_BTHK, v=v_BTGV, g=g_BTG, step_size=dt_BTG)
        o_BTGV, memory, shift_BTGV = self.answer(x_BTD, q_BTHK, k_BTHK, v_BTGV, dt_BTG, g_BTG, run, scale=1.0)
        if shift_BTGV is not None:
            z = z + shift_BTGV.flatten(2).to(z.dtype)
        self.probe(o=o_BTGV, output_gate=lambda: None if gate is None else GATES[gate](z).view_as(o_BTGV))
        if cache is not None and conv_state is not None:
            cache.update(memory, {"vkq": conv_state})
        backend, given = choose_layer_backend(backend), None if gate is None else z
        skip, o = self.skip, o_BTGV.flatten(2)
        added: tuple[Tensor | None, Tensor | None] = None, None
        if skip is not None and is_bare(skip, ValueSkip):
            added = v_BTGV.flatten(2), skip.D
        joined = joins_norm(o, self.norm, self.out_proj, given, *added, backend=backend)
        if skip is not None and not (joined and added[0] is not None):
            o = skip(o_BTGV, v_BTGV).flatten(2)
        if joined:
            return multiply_rows(
                o, [self.out_proj.product()], self.norm.of_rows(given, gate or "silu", *added)
            ).results[0]
        return self.out_proj(self.norm(o, given, gate or "silu", backend))

    def input_products(self) -> InputProducts:
        return plain_products(self.in_proj)

    def _split(self, vkq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v [B, T, G, V], k and q [B, T, H, K] of the channels that the convolution goes over."""
        heads = self.heads
        v, k, q = vkq.split(self.convolved, 2)
        return v.unflatten(2, (-1, heads.value)), k.unflatten(2, (-1, heads.key)), q.unflatten(2, (-1, heads.key))

    def sections(self) -> Mapping[str, Sequence[int]]:
        gate, _, steps = self.widths
        return {"in_proj": [gate, *self.convolved, steps], "conv": self.convolved}

    def take_part(self, part: HeadPart) -> None:
        super().take_part(part)
        self.norm.span = part.span("norm_groups")


register_mixer(
    "mamba2",
    layer=PalimpsaM,
    options={"metaplasticity": False},
    summary="Mamba-2: linear attention whose step size sets both decay and write",
    equation="S = exp(-A dt) S + k (dt v)^T, o = S^T q + D v",
    source="Dao and Gu 2024 (Mamba-2); Palimpsa, section 2.4",
    cost=f"H ({ADDITIVE})",
)
