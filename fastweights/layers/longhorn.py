"""Longhorn as in table 1 of Palimpsa: one gain per value channel, every element of the memory corrected by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checks import check_flag
from ..ops import linear_attention
from .cache import check_memory
from .memory_layer import MemoryLayer, RuleCall
from .norms import at_least_float32
from .options import MemoryOptions, option
from .registry import MATRIX, register_mixer

__all__ = ["ElementwiseLonghorn", "ElementwiseLonghornOptions"]

NUMBERS = 2**26  # of the decays that are held at a time


@dataclass(frozen=True, kw_only=True)
class ElementwiseLonghornOptions(MemoryOptions):
    """Options of `ElementwiseLonghorn`: those of `MemoryOptions`, with keys of any length."""

    normalize_qk: bool = option(False, check_flag)


@register_mixer(
    "longhorn-elementwise",
    summary="Longhorn's diagonal form: every element of the memory corrects itself, one gain per value channel",
    equation="S_kv = S_kv + e_v k_k (v_v - k_k S_kv), e = beta / (1 + beta |k|^2)",
    source="Liu et al. 2024 (Longhorn); Palimpsa, table 1",
    state=MATRIX,
    cost="H V (2 K + C (K + 1) / 2)",
)
class ElementwiseLonghorn(MemoryLayer):
    r"""A sequence mixer whose memory elements each forget by how much of a key they have seen.

    $$S_t = \Big(1 - k_t^2 \epsilon_t^\top\Big) \odot S_{t-1} + k_t (\epsilon_t \odot v_t)^\top, \qquad
      \epsilon_t = \frac{\beta_t}{1 + \beta_t |k_t|^2}, \qquad o_t = S_t^\top q_t$$

    with beta the sigmoid of a projection of rank hidden_size / 16, one number per value channel. Longhorn (Liu et al. 2024) with
    its diagonal approximation, as Palimpsa's table 1 compares it; the mixer `longhorn` has the full rule with one beta per head.
    The decay has a number per element of the memory: it is computed as gated linear attention of every value channel by
    itself, some channels at a time, and again in the backward.

    Args:
        normalize_qk: whether queries and keys are divided by their length; not by default.

    The other options are those of `MemoryOptions`.
    """

    Options = ElementwiseLonghornOptions
    options: ElementwiseLonghornOptions
    probes = {**MemoryLayer.probes, "beta": ""}

    def build(self) -> None:
        rank, channels = max(1, self.hidden_size // 16), self.heads.value_heads * self.heads.value
        self.beta_proj = nn.Sequential(
            nn.Linear(self.hidden_size, rank, bias=False), nn.Linear(rank, channels, bias=False)
        )

    def rule(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, run: RuleCall
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        beta_BTGV = torch.sigmoid(at_least_float32(self.beta_proj(x_BTD))).view_as(v_BTGV)
        self.probe(beta=lambda: write_gains(k_BTHK, beta_BTGV)[0])
        check_memory(run.memory, ("S",))
        S_NGKV = run.memory.get("S")
        together = max(1, NUMBERS // (v_BTGV[..., 0].numel() * self.heads.key))
        again = torch.is_grad_enabled() and together < self.heads.value and not torch.compiler.is_compiling()
        outputs, states = [], list[Tensor]()
        for first in range(0, self.heads.value, together):
            part = slice(first, first + together)
            before = None if S_NGKV is None else S_NGKV[..., part]
            inputs = (q_BTHK, k_BTHK, v_BTGV[..., part], beta_BTGV[..., part], before, run.keywords)
            o, S = checkpoint(read_channels, *inputs, use_reentrant=False) if again else read_channels(*inputs)
            outputs.append(o)
            states += [] if S is None else [S]
        return torch.cat(outputs, -1), {"S": torch.cat(states, -1) if states else None}

    def state_size(self, length: int = 1) -> int:
        return self.heads.value_heads * self.heads.key * self.heads.value


def read_channels(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor | None, keywords: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Answers [B, T, G, V] of some value channels, and their memory [N, G, K, V]. Each is a head of its own with a decay per key
    channel."""
    gain, g = write_gains(k, beta)
    before = None if S is None else S.mT.flatten(1, 2)[..., None]
    values = (gain * v).to(v.dtype).flatten(2, 3)[..., None]
    o, after = linear_attention(q, k, values, g.flatten(2, 3), initial_state=before, **keywords)
    shape = v.shape[2:]
    return o[..., 0].unflatten(2, shape), None if after is None else after[..., 0].unflatten(1, shape).mT


def write_gains(k_BTHK: Tensor, beta_BTGV: Tensor) -> tuple[Tensor, Tensor]:
    """e = beta / (1 + beta |k|^2) [B, T, G, V] and the log decays log(1 - k_k^2 e_v) [B, T, G, V, K], the latter without
    cancellation: 1 - k_k^2 e_v = (1 + beta_v (|k|^2 - k_k^2)) / (1 + beta_v |k|^2)."""
    square = (
        at_least_float32(k_BTHK).square().repeat_interleave(beta_BTGV.shape[2] // k_BTHK.shape[2], 2)[:, :, :, None]
    )
    length, beta = square.sum(-1, keepdim=True), beta_BTGV[..., None]
    g = (beta * (length - square).clamp_min(0)).log1p() - (beta * length).log1p()
    return beta_BTGV / (1 + beta_BTGV * length[..., 0]), g.clamp_max(0)
