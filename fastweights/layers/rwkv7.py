"""RWKV-7's time mixing: a memory that decays per channel and erases along directions of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import LARGEST_WIDTH, check_flag, check_positive, check_tensor, shape_of
from ..ops import dplr_delta_rule
from ..ops.authoring import (
    BACKENDS,
    ContextParallel,
    Product,
    erase_keys,
    multiply_rows,
    read_answers,
    short_convolution,
    takes_rwkv7,
    token_mix,
)
from .cache import LayerCache
from .heads import HeadSizes
from .initialization import OwnInitialValues, ResidualProjection
from .memory_layer import OpLayer, RuleCall
from .mixer import check_input
from .norms import at_least_float32
from .options import MixerOptions, one_of, option, up_to
from .projections import choose_layer_backend
from .registry import register_mixer
from .shared_input import joins, project
from .wrapped import is_bare

__all__ = ["RWKV7"]

LARGEST_DECAY = math.exp(-0.5)  # of -g: no channel keeps less than exp(-exp(-1/2)) = 0.545 per token
# The streams that x is mixed to, and the powers of channel / channels in their first shares of the token before: the released
# code's for its first layer.
STREAMS = {"q": 0.2, "decay": 0.9, "k": 0.7, "v": 0.7, "rate": 0.9, "gate": 0.2}


class TokenShift(OwnInitialValues):
    """x + mix (the token before - x), with one mix per channel for each of several streams; before the first token there is 0."""

    _no_weight_decay = ("mix",)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(len(STREAMS), channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        channel = torch.linspace(0, 1, self.mix.shape[1] + 1, device=self.mix.device)[:-1]
        return {"mix": torch.stack([1 - channel**power for power in STREAMS.values()])}

    def forward(
        self,
        x_BTD: Tensor,
        before_N1D: Tensor | None,
        cu_seqlens: Tensor | None,
        keep: bool,
        backend: str,
        cp_group: ContextParallel | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """The streams [B, T, D], and with `keep` the last token of each sequence [N, 1, D]. cp_group: of the mixer."""
        one_D1 = x_BTD.new_ones(x_BTD.shape[2], 1)
        shift_D2 = torch.cat([one_D1, 0 * one_D1], 1)  # a filter that answers with the token before
        earlier_BTD, last_N1D = short_convolution(
            x_BTD,
            shift_D2,
            initial_state=before_N1D,
            output_final_state=keep,
            cu_seqlens=cu_seqlens,
            backend=backend,
            cp_group=cp_group,
        )
        change_BTD = earlier_BTD - x_BTD
        return [torch.addcmul(x_BTD, change_BTD, mix.to(x_BTD.dtype)) for mix in self.mix], last_N1D


class LowRank(OwnInitialValues):
    """base + W2 f(W1 x), in float32 or better."""

    _no_weight_decay = ("base",)

    def __init__(self, hidden_size: int, rank: int, channels: int, first_base: str) -> None:
        super().__init__()
        self.first_base = first_base
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, channels, bias=False)
        self.base = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        position = torch.linspace(0, 1, len(self.base), device=self.base.device)
        first = {"rate": 0 * position, "value": 0 * position + 1, "decay": 5 * position**0.85 - 6.5}
        return {"base": first[self.first_base]}

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.down(x_BTD)
        return at_least_float32(self.up(h.tanh() if self.first_base == "decay" else h)) + at_least_float32(self.base)


class Keys(OwnInitialValues):
    """The direction that is erased, unit(k * erase), and the key that is written, k (1 + share (rate - 1))."""

    _no_weight_decay = ("erase", "share")

    def __init__(self, heads: HeadSizes) -> None:
        super().__init__()
        self.erase = nn.Parameter(torch.empty(heads.key_heads, heads.key))
        self.share = nn.Parameter(torch.empty(heads.key_heads, heads.key))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"erase": torch.full_like(self.erase, 0.85), "share": torch.ones_like(self.share)}

    def forward(self, k_BTHK: Tensor, rate_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        k = at_least_float32(k_BTHK)
        return F.normalize(k * at_least_float32(self.erase), dim=-1), k * (
            1 + at_least_float32(self.share) * (rate_BTHK - 1)
        )


class Bonus(OwnInitialValues):
    """(q . (rho * k)) v: a token's own value, past the memory."""

    _no_weight_decay = ("rho",)

    def __init__(self, heads: HeadSizes) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.empty(heads.key_heads, heads.key))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"rho": torch.zeros_like(self.rho)}

    def forward(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor) -> Tensor:
        return (q_BTHK * k_BTHK * self.rho.to(k_BTHK.dtype)).sum(-1, keepdim=True) * v_BTHV


def low_rank(width: int, factor: float, power: float = 0.5) -> int:
    """factor width^power, rounded to a multiple of 32: the released code's rank of a gate."""
    return max(32, 32 * round(factor * width**power / 32))


@dataclass(frozen=True, kw_only=True)
class RWKV7Options(MixerOptions):
    """Options of `RWKV7`, whose docstring explains them."""

    decay_rank: int | None = option(None, up_to(LARGEST_WIDTH))
    rate_rank: int | None = option(None, up_to(LARGEST_WIDTH))
    value_rank: int | None = option(None, up_to(LARGEST_WIDTH))
    gate_rank: int | None = option(None, up_to(LARGEST_WIDTH))
    value_residual: bool = option(False, check_flag)
    norm_eps: float = option(64e-5, check_positive)
    backend: str = option("auto", one_of(*BACKENDS))

    def check_together(self) -> None:
        super().check_together()
        self.head_sizes()
        if self.value_rank is not None and not self.value_residual:
            raise ValueError(
                f"value_rank must be None without value_residual, which it belongs to, got {self.value_rank}"
            )

    def head_sizes(self) -> HeadSizes:
        """Numbers and widths of the heads."""
        return HeadSizes.choose(self.hidden_size, self.num_heads, self.head_dim, 1.0, None)


@register_mixer(
    "rwkv7",
    summary="RWKV-7: one decay per key channel, erases along a key of its own with one rate per channel",
    equation="S = (Diag(w) - (eta * kappa) kappa^T) S + k v^T, o = S^T r",
    source="Peng et al. 2025 (RWKV-7), section 4.1",
    cost="H (4 K V + C (5 K + 4 V) / 2)",
)
class RWKV7(OpLayer):
    r"""A sequence mixer whose memory erases along one direction and writes along another.

    $$S_t = (\mathrm{Diag}(w_t) - (\eta_t \odot \hat\kappa_t) \hat\kappa_t^\top) S_{t-1} + \tilde k_t v_t^\top, \qquad
      o_t = S_t^\top r_t$$

    The time mixing of RWKV-7 (Peng et al. 2025, section 4.1; S is the transpose of the paper's wkv). Six streams mix each token
    with the one before. From them come the receptance r, k and v by full matrices, and by matrices of low rank the decay
    $w = \exp(-e^{-1/2} \sigma(d))$, the in-context learning rate $\eta = \sigma(\cdot)$ and the gate. $\hat\kappa$ is k times a
    learned factor per channel, of length 1 per head; $\tilde k = k (1 + \alpha(\eta - 1))$. The answer passes a norm per head
    (mean and variance), a bonus $(r \cdot \rho \tilde k) v$ is added, the gate multiplies it, and a last matrix projects it.
    There are no short convolutions.

    The published models have heads of 64 channels (num_heads = hidden_size / 64). In all layers but the first they pull v towards
    the values of the first layer; `value_residual` does that, and forward then needs these values.

    Args:
        head_dim: channels K = V of a head; hidden_size / num_heads when None.
        decay_rank: rank of the decay; 1.8 sqrt(D) when None. Ranks are rounded to multiples of 32, as in the released code.
        rate_rank: rank of the learning rate eta; 1.8 sqrt(D) when None.
        value_rank: rank of the value residual; 1.3 sqrt(D) when None.
        gate_rank: rank of the gate; 0.6 D^0.8 when None.
        value_residual: whether v moves towards the values of the first layer.
        norm_eps: number added in the norm of the answer, positive.
        backend: backend of the op, see `fastweights.ops.dplr_delta_rule`.
    """

    Options = RWKV7Options
    serves_context_parallel = True
    op = dplr_delta_rule
    options: RWKV7Options
    probes = dict.fromkeys(("q", "k", "v", "o", "g", "beta", "read_key", "output_gate", "state"), "")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        settings, width = self.options, self.hidden_size
        heads = self.heads = settings.head_sizes()
        channels = heads.key_heads * heads.key
        self.takes_first_values, self.gives_values = settings.value_residual, not settings.value_residual
        self.shift = TokenShift(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, channels, bias=False) for _ in range(3))
        self.decay = LowRank(width, settings.decay_rank or low_rank(width, 1.8), channels, "decay")
        self.rate = LowRank(width, settings.rate_rank or low_rank(width, 1.8), channels, "rate")
        self.value_mix = None
        if settings.value_residual:
            self.value_mix = LowRank(width, settings.value_rank or low_rank(width, 1.3), channels, "value")
        rank = settings.gate_rank or low_rank(width, 0.6, 0.8)
        self.g_proj = nn.Sequential(
            nn.Linear(width, rank, bias=False), nn.Sigmoid(), nn.Linear(rank, channels, bias=False)
        )
        self.keys = Keys(heads)
        self.norm = nn.GroupNorm(heads.key_heads, channels, eps=settings.norm_eps)
        self.bonus = Bonus(heads)
        self.o_proj = ResidualProjection(channels, width)

    def forward(
        self,
        x_BTD: Tensor,
        cache: LayerCache | None = None,
        cu_seqlens: Tensor | None = None,
        first_values: Tensor | None = None,
    ) -> Tensor:
        """As `Mixer.forward`.

        Args:
            first_values: with value_residual, and only then, the `values` of the first layer [B, T, H V].
        """
        check_input(self, x_BTD, cache, cu_seqlens)
        backend = self.options.backend
        run = RuleCall(cache, cu_seqlens, backend, cp_group=self.cp_group)
        if self._takes_step(x_BTD, cu_seqlens):
            return self._step(x_BTD, run, cache, first_values)
        streams, last_N1D = self.shift(
            x_BTD,
            run.context.get("shift"),
            cu_seqlens,
            cache is not None,
            choose_layer_backend(backend),
            cp_group=self.cp_group,
        )
        x_q, x_decay, x_k, x_v, x_rate, x_gate = streams
        v = self._mix_values(self.v_proj(x_v), x_v, first_values)
        q_BTHK, k_BTHK, v_BTHV = (y.unflatten(2, (-1, self.heads.key)) for y in (self.q_proj(x_q), self.k_proj(x_k), v))
        g, rate = -LARGEST_DECAY * self.decay(x_decay).sigmoid(), self.rate(x_rate).sigmoid()
        g_BTHK, rate_BTHK = (y.unflatten(2, (-1, self.heads.key)) for y in (g, rate))
        kappa_BTHK, k_BTHK = self.keys(k_BTHK, rate_BTHK)
        a_BTHK, b_BTHK, k_BTHK = (y.to(v.dtype) for y in (-kappa_BTHK, kappa_BTHK * rate_BTHK, k_BTHK))
        gate = self.g_proj(x_gate)
        self.probe(q=q_BTHK, k=k_BTHK, v=v_BTHV, g=g_BTHK, beta=rate_BTHK, read_key=kappa_BTHK)
        o_BTHV, memory = run(self.op, q_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK, g_BTHK, scale=1.0)
        self.probe(o=o_BTHV, output_gate=gate.view_as(o_BTHV))
        if cache is not None and last_N1D is not None:
            cache.update(memory, {"shift": last_N1D})
        o = self.norm(o_BTHV.flatten(0, 1).flatten(1)).to(v.dtype).view_as(v)
        return self.o_proj((o + self.bonus(q_BTHK, k_BTHK, v_BTHV).flatten(2)) * gate)

    def _takes_step(self, x_BTD: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether the kernels of one token serve this call, and nothing notices how the parts are called."""
        low, keys, norm = (self.decay, self.rate), self.keys, self.norm
        backend = choose_layer_backend(self.options.backend)
        parts = ((self.shift, TokenShift), *((one, LowRank) for one in low), (keys, Keys), (self.bonus, Bonus))
        linear = (self.q_proj, self.k_proj, self.v_proj, *(one.down for one in low), self.g_proj[0], self.o_proj)
        return (
            cu_seqlens is None
            and self.cp_group is None
            and all(is_bare(part, kind) for part, kind in (*parts, (norm, nn.GroupNorm), (self.g_proj, nn.Sequential)))
            and joins(x_BTD, *linear, *(one.up for one in low), self.g_proj[2], backend=backend)
            and takes_rwkv7(
                x_BTD, self.shift.mix, keys.erase, keys.share, self.bonus.rho, norm.weight, norm.bias, backend=backend
            )
        )  # fmt: skip

    def _step(self, x_N1D: Tensor, run: RuleCall, cache: LayerCache | None, first_values: Tensor | None) -> Tensor:
        """`forward` of one token per sequence in seven launches."""
        streams_SN1D, last_N1D = token_mix(x_N1D, run.context.get("shift"), self.shift.mix, cache is not None)
        q, low_decay, k, v, low_rate, low_gate = multiply_rows(
            list(streams_SN1D),
            [
                Product(self.q_proj.weight),
                Product(self.decay.down.weight, "tanh"),
                Product(self.k_proj.weight),
                Product(self.v_proj.weight),
                Product(self.rate.down.weight),
                Product(cast(Tensor, self.g_proj[0].weight), "sigmoid", rounds=True),
            ],
        ).results
        v = self._mix_values(v, streams_SN1D[list(STREAMS).index("v")], first_values)
        g, rate, gate = multiply_rows(
            [low_decay, low_rate, low_gate],
            [
                Product(self.decay.up.weight, "sigmoid", self.decay.base, largest=-LARGEST_DECAY),
                Product(self.rate.up.weight, "sigmoid", self.rate.base),
                Product(cast(Tensor, self.g_proj[2].weight)),
            ],
        ).results
        q, k, v, g, rate, gate = (y.unflatten(2, (-1, self.heads.key)) for y in (q, k, v, g, rate, gate))
        a, b, k = erase_keys(k, rate, self.keys.erase, self.keys.share)
        self.probe(q=q, k=k, v=v, g=g, beta=rate, read_key=lambda: -a, output_gate=gate)
        o, memory = run(self.op, q, k, v, a, b, g, scale=1.0)
        self.probe(o=o)
        if cache is not None and last_N1D is not None:
            cache.update(memory, {"shift": last_N1D})
        norm = self.norm
        y = read_answers(o, q, k, v, gate, rho=self.bonus.rho, weight=norm.weight, bias=norm.bias, eps=norm.eps)
        return project(y, self.o_proj)

    def values(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """The values [B, T, D] of a layer without value_residual, before its forward has brought the cache up to date: of the
        first layer, what the others take as `first_values`."""
        before, backend = (
            None if cache is None else cache.context.get("shift"),
            choose_layer_backend(self.options.backend),
        )
        streams, _ = self.shift(x_BTD, before, cu_seqlens, False, backend, cp_group=self.cp_group)
        return self.v_proj(streams[list(STREAMS).index("v")])

    def _mix_values(self, v_BTD: Tensor, x_BTD: Tensor, first_BTD: Tensor | None) -> Tensor:
        if (self.value_mix is None) != (first_BTD is None):
            raise ValueError(
                f"first_values must be {'None without' if self.value_mix is None else 'given with'} value_residual, got "
                f"{'a tensor' if self.value_mix is None else 'None'}; they are the values of the first layer, see values()"
            )
        if self.value_mix is None or first_BTD is None:
            return v_BTD
        if check_tensor("first_values", first_BTD, v_BTD).shape != v_BTD.shape:
            raise ValueError(f"first_values must have shape {shape_of(v_BTD)}, got {shape_of(first_BTD)}")
        return torch.lerp(v_BTD, first_BTD.to(v_BTD.dtype), self.value_mix(x_BTD).sigmoid().to(v_BTD.dtype))
