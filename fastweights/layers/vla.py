"""Variational linear attention, and the baselines of its text as printed: no convolutions, no norm of keys or answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_flag, check_positive, check_size
from ..ops import delta_rule, variational_linear_attention
from ..ops.authoring import (
    InPlace,
    Product,
    State,
    expand_heads,
    multiply_rows,
    penalized_memory,
    positive_keys,
    read_keys,
    takes_delta_writes,
    takes_positive_keys,
)
from .cache import check_memory
from .initialization import OwnInitialValues, ResidualProjection
from .linear_attention import LinearAttention
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import HeadsLayerNorm, at_least_float32, l2_normalize
from .options import LONGEST_CONVOLUTION, MemoryOptions, ProjectionOptions, at_least_zero, one_of, option, up_to
from .probe import read_states
from .projections import ACTIVATIONS, choose_layer_backend
from .registry import ADDITIVE, DELTA, EXACT, register_mixer
from .shared_input import InputProducts, is_plain, joins, joins_norm, multiply, project_trained
from .softmax_attention import SoftmaxAttention
from .wrapped import is_bare

__all__ = ["PrintedDeltaNet", "VariationalLinearAttention"]

SMALLEST_LOG_GATE = -10.0  # a smaller gate counts as exp(-10): the key that the error is read with is divided by it
BARE: dict[str, Any] = {"conv_size": None, "activation": "none", "normalize_qk": False, "output_norm": False}


@dataclass(frozen=True, kw_only=True)
class VLAOptions(ProjectionOptions):
    """Options of `VariationalLinearAttention`, whose docstring explains them."""

    conv_size: int | None = option(None, up_to(LONGEST_CONVOLUTION))
    activation: str = option("none", one_of(*ACTIVATIONS))
    adaptive: bool = option(True, check_flag)
    ridge: float = option(0.1, check_positive)
    refresh_every: int | None = option(20, check_size, or_none=True)
    refresh: float = option(1e-3, at_least_zero)
    normalize_keys: bool = option(True, check_flag)
    normalize_writes: bool = option(True, check_flag)
    norm_eps: float = option(1e-5, check_positive)


class PenaltyDirection(OwnInitialValues):
    """u = unit(W_u k) / sqrt(K), one matrix per q/k head: [B, T, H, K]."""

    def __init__(self, num_heads: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, channels, channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        weight = torch.empty_like(self.weight, dtype=torch.float32)
        return {"weight": weight.normal_(std=weight.shape[-1] ** -0.5)}

    def forward(self, k_BTHK: Tensor) -> Tensor:
        direction = torch.einsum("bthk,hkj->bthj", k_BTHK, self.weight.to(k_BTHK.dtype))  # @ would repeat the weight
        return l2_normalize(direction) * k_BTHK.shape[-1] ** -0.5


@register_mixer(
    "vla",
    summary="variational linear attention: writes along directions that a penalty bends",
    equation="A = (A^-1 + u u^T)^-1, S = S + unit(A k) (v - S^T k)^T, o = S^T q / (z.q)",
    source="Variational Linear Attention, section 3, Algorithm 1",
    cost=f"H ({EXACT} + 2 K + C (K + 1) / 2)",
)
class VariationalLinearAttention(MemoryLayer):
    r"""A sequence mixer whose write direction comes from an adaptive penalty matrix.

    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad \alpha_t = A_t \hat k_t / |A_t \hat k_t|, \qquad
      S_t = S_{t-1} + \alpha_t (v_t - S_{t-1}^\top \hat k_t)^\top, \qquad o_t = S_t^\top q_t / (z_t^\top q_t)$$

    with q and k = ELU + 1 of the raw ones, khat = k / |k|, u the unit direction of a projection of the raw key divided by
    sqrt(K), z the sum of the k, and $A_0 = I / \mathrm{ridge}$. The answers of all heads pass one LayerNorm and the output
    projection. Variational Linear Attention, section 3 and Algorithm 1, which has neither convolutions nor an activation before
    ELU + 1; the mixer `vla-conv` has both. docs/rules.md lists the departures from its text.

    Without normalisation the step is $I - \alpha_t k_t^\top$ with an eigenvalue $1 - \alpha_t \cdot k_t$: beyond 2 the memory
    grows without end, and at ridge 0.1 alpha . khat starts at 10. The paper finds NaN from 96 dimensions on (its tables 2 and
    4); a ridge of at least 1/2 keeps `normalize_writes` False alone within bounds.

    Args:
        conv_size: width of short convolutions; None for none.
        activation: function of q, k and v before ELU + 1, "silu" or "none".
        adaptive: whether A changes; otherwise it stays I / ridge, which is the delta rule with gain 1.
        ridge: penalty before the first token, positive.
        refresh_every: number of tokens between additions of `refresh` to A's diagonal, or None.
        refresh: number added to A's diagonal, at least 0.
        normalize_keys: whether khat has length 1; otherwise it is k.
        normalize_writes: whether alpha has length 1; otherwise it is A khat.
        norm_eps: number added in the LayerNorm, positive.

    The other options are those of `ProjectionOptions`.
    """

    Options = VLAOptions
    decodes_in_pool = True
    options: VLAOptions
    probes = {**dict.fromkeys(("q", "k", "v", "o", "state"), ""), "write_key": "", "penalty_direction": "penalty"}

    def build_projection(self, normalize_qk: bool | None = None) -> None:
        super().build_projection(normalize_qk=False)  # ELU + 1 comes first

    def build(self) -> None:
        heads = self.heads
        self.penalty = PenaltyDirection(heads.key_heads, heads.key) if self.options.adaptive else None

    def build_output(self) -> None:
        channels = self.heads.value_heads * self.heads.value
        self.norm = HeadsLayerNorm(channels, eps=self.options.norm_eps)
        self.o_proj = ResidualProjection(channels, self.hidden_size)

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        options = self.options
        weight, backend = None if self.penalty is None else self.penalty.weight, choose_layer_backend(options.backend)
        if (self.penalty is None or is_bare(self.penalty, PenaltyDirection)) and takes_positive_keys(
            q_BTHK, k_BTHK, weight, backend
        ):
            q_BTHK, k_BTHK, u_BTHK = positive_keys(q_BTHK, k_BTHK, weight)
        else:
            u_BTHK = None if self.penalty is None else self.penalty(k_BTHK)
            q_BTHK, k_BTHK = F.elu(q_BTHK) + 1, F.elu(k_BTHK) + 1
        self.probe(q=q_BTHK, k=k_BTHK, penalty_direction=u_BTHK)
        self.probe(write_key=lambda: self._write_keys(x_BTD, k_BTHK, run))
        o_BTGV, state = penalized_memory(
            q_BTHK, k_BTHK, v_BTGV, u_BTHK, ridge=options.ridge, refresh_every=options.refresh_every, refresh=options.refresh,
            eps=1e-4, normalize_keys=options.normalize_keys, normalize_writes=options.normalize_writes,
            initial_state=self._state(run), **run.keywords,
        )  # fmt: skip
        memory: dict[str, Any] = {} if state is None else dict(state)
        if run.rows is not None:  # the op has overwritten what the cache holds
            memory = {**run.memory, "count": run.context["seen"]}
        if memory:
            run.new_context["seen"] = memory.pop("count")
        return o_BTGV, memory

    def _write_keys(self, x_BTD: Tensor, k_BTHK: Tensor, run: RuleCall) -> Tensor:
        """alpha_t [B, T, G, K]. For probes: the op forms them inside."""
        options = self.options
        k_BTGK = k_BTHK.repeat_interleave(self.heads.value_heads // self.heads.key_heads, 2)
        if options.normalize_keys:
            k_BTGK = F.normalize(k_BTGK, dim=-1)
        if self.penalty is None:
            alpha = k_BTGK / options.ridge
        else:
            A_BTGKK = read_states(self, x_BTD, run.cache_before(), run.keywords["cu_seqlens"], 1)[1]["A"]
            alpha = (A_BTGKK @ k_BTGK.to(A_BTGKK.dtype)[..., None]).squeeze(-1)
        return F.normalize(alpha, dim=-1) if options.normalize_writes else alpha

    def _state(self, run: RuleCall) -> Any:
        """(S, A, z, number of tokens) of earlier calls, without A where it does not change; None at the start."""
        names = "Sz" if self.penalty is None else "SAz"
        check_memory(run.memory, names)
        if not run.memory:
            return None
        state = (*(run.memory[name] for name in names), run.context["seen"])
        return state if run.rows is None else InPlace(state, run.rows)

    def read_out(self, o_BTGV: Tensor, v_BTGV: Tensor, x_BTD: Tensor, **for_gate: Tensor) -> Tensor:
        o_BTE, backend = o_BTGV.flatten(2), choose_layer_backend(self.options.backend)
        if joins_norm(o_BTE, self.norm, self.o_proj, backend=backend):
            return multiply_rows(o_BTE, [self.o_proj.product()], self.norm.of_rows()).results[0]
        return project_trained(self.norm(o_BTE), self.o_proj)

    @classmethod
    def states(cls, options: Any) -> Mapping[str, State]:
        states = variational_linear_attention.spec.states
        return {name: state for name, state in states.items() if options.adaptive or name != "A"}


register_mixer(
    "vla-conv",
    layer=VariationalLinearAttention,
    options={"conv_size": 4, "activation": "silu"},
    summary="vla behind short convolutions with SiLU, as the other layers here have",
    equation="A = (A^-1 + u u^T)^-1, S = S + unit(A k) (v - S^T k)^T, o = S^T q / (z.q)",
    source="Variational Linear Attention, section 3; the convolutions are this library's",
    cost=f"H ({EXACT} + 2 K + C (K + 1) / 2)",
)


@dataclass(frozen=True, kw_only=True)
class PrintedDeltaNetOptions(MemoryOptions):
    """Options of `PrintedDeltaNet`: those of `MemoryOptions`, with the defaults of the paper's block."""

    conv_size: int | None = option(None, up_to(LONGEST_CONVOLUTION))
    activation: str = option("none", one_of(*ACTIVATIONS))
    normalize_qk: bool = option(False, check_flag)
    output_norm: bool = option(False, check_flag)


@register_mixer(
    "vla-deltanet",
    summary="'DeltaNet' as the paper of vla prints it: a decay in place of the gain",
    equation="S = b S + k (v - S^T k)^T, o = S^T q",
    source="Variational Linear Attention, eq. 4",
    cost=f"H ({DELTA})",
)
class PrintedDeltaNet(MemoryLayer):
    r"""A sequence mixer whose memory decays as a whole while it is corrected by the full error.

    $$S_t = b_t S_{t-1} + k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = S_t^\top q_t$$

    with b the sigmoid of a projection, one number per head. Variational Linear Attention, equation 4, calls this DeltaNet, which
    it is not: the gate of DeltaNet is on the correction (the mixer `deltanet`). Here a write of a key of length above
    sqrt(1 + b) reverses and enlarges what the memory holds along that key, so that the memory can diverge.

    Args:
        conv_size: width of short convolutions; None, the default, for none.
        activation: function of q, k and v before the rule, "silu" or, the default, "none".
        normalize_qk: whether queries and keys are divided by their length; not by default.
        output_norm: whether the answer of each head passes an RMSNorm; not by default.

    The other options are those of `MemoryOptions`.
    """

    Options = PrintedDeltaNetOptions
    op = delta_rule
    decodes_in_pool = True
    options: PrintedDeltaNetOptions
    probes = {**MemoryLayer.probes, "g": ""}

    def build(self) -> None:
        self.gate_proj = nn.Linear(self.hidden_size, self.heads.value_heads, bias=False)

    def input_products(self) -> InputProducts:
        return [(self.gate_proj, self._product())] if is_plain(self.gate_proj) else []

    def _product(self) -> Product:
        return Product(self.gate_proj.weight, "logsigmoid")

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        if joins(x_BTD, self.gate_proj):
            g_BTG = multiply(x_BTD, self.gate_proj, self._product())
        else:
            g_BTG = F.logsigmoid(at_least_float32(self.gate_proj(x_BTD)))
        # The op takes the error of the decayed memory b S: with the key k / b that is the error of S.
        heads = v_BTGV.shape[2]
        q_BTGK, k_BTGK = (expand_heads(y, heads) for y in (q_BTHK, k_BTHK))
        error_key: Tensor | None
        if takes_delta_writes(k_BTHK, g_BTG, backend=choose_layer_backend(self.options.backend)):
            error_key, _, least_BTG = read_keys(k_BTHK, heads, g=g_BTG, least=SMALLEST_LOG_GATE)
            assert least_BTG is not None
            g_BTG = least_BTG
        else:
            g_BTG = g_BTG.clamp_min(SMALLEST_LOG_GATE)
            error_key = (k_BTGK * (-g_BTG).exp()[..., None]).to(k_BTGK.dtype)
        self.probe(g=g_BTG)
        ones = g_BTG.new_ones(g_BTG.shape)
        return run(self.op, q_BTGK, error_key, v_BTGV, ones, g_BTG, write_key=k_BTGK, scale=1.0)


register_mixer(
    "vla-linear",
    layer=LinearAttention,
    options={**BARE, "feature_map": "elu", "normalizer": True},
    summary="linear attention divided by the sum of its weights, the baseline of vla",
    equation="S = S + k v^T, z = z + k, o = S^T q / (z.q), q and k after ELU + 1",
    source="Katharopoulos et al. 2020; Variational Linear Attention, eq. 3",
    cost=f"H ({ADDITIVE} + 2 K + C (K + 1) / 2)",
)
register_mixer(
    "vla-softmax",
    layer=SoftmaxAttention,
    options={"rope_theta": None},
    summary="causal softmax attention without positions, the baseline of vla",
    equation="o_t = sum_s softmax_s(q_t.k_s / sqrt K) v_s",
    source="Variational Linear Attention, eq. 2",
    state="2 T H K after T tokens",
    cost="2 T H K after T tokens",
)
