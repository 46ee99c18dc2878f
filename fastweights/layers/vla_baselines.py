"""The baselines of Variational Linear Attention as its text prints them: no convolutions, no norm of keys or answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_flag
from ..ops import delta_rule
from ..ops.authoring import expand_heads
from .linear_attention import LinearAttention
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import at_least_float32
from .options import LONGEST_CONVOLUTION, MemoryOptions, one_of, option, up_to
from .projections import ACTIVATIONS
from .registry import ADDITIVE, DELTA, register_mixer
from .softmax_attention import SoftmaxAttention

__all__ = ["PrintedDeltaNet", "PrintedDeltaNetOptions"]

SMALLEST_LOG_GATE = -10.0  # a smaller gate counts as exp(-10): the key that the error is read with is divided by it
BARE: dict[str, Any] = {"conv_size": None, "activation": "none", "normalize_qk": False, "output_norm": False}


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

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        g_BTG = F.logsigmoid(at_least_float32(self.gate_proj(x_BTD))).clamp_min(SMALLEST_LOG_GATE)
        self.probe(g=g_BTG)
        # The op takes the error of the decayed memory b S: with the key k / b that is the error of S.
        q_BTGK, k_BTGK = (expand_heads(y, v_BTGV.shape[2]) for y in (q_BTHK, k_BTHK))
        error_key = (k_BTGK * (-g_BTG).exp()[..., None]).to(k_BTGK.dtype)
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
