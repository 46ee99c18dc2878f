"""Longhorn as in table 1 of Palimpsa: one gain per value channel, every element of the memory corrected by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checks import check_flag
from ..ops import elementwise_longhorn
from ..ops.authoring import expand_heads
from .memory_layer import Answer, MemoryLayer, RuleCall
from .norms import at_least_float32
from .options import MemoryOptions, option
from .registry import register_mixer

__all__ = ["ElementwiseLonghorn", "ElementwiseLonghornOptions"]


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

    def rule(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall) -> Answer:
        beta_BTGV = torch.sigmoid(at_least_float32(self.beta_proj(x_BTD))).view_as(v_BTGV)
        self.probe(beta=lambda: gain_of_writes(k_BTHK, beta_BTGV))
        return run(self.op, q_BTHK, k_BTHK, v_BTGV, beta_BTGV)


def gain_of_writes(k_BTHK: Tensor, beta_BTGV: Tensor) -> Tensor:
    """e = beta / (1 + beta |k|^2), [B, T, G, V]."""
    length = at_least_float32(k_BTHK).square().sum(-1, keepdim=True)
    return beta_BTGV / (1 + beta_BTGV * expand_heads(length, beta_BTGV.shape[2]))
