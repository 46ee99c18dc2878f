"""One block of a language model: a sequence mixer, then an MLP, each after a norm and added to the residual stream."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layers import LayerCache, build_mixer
from ..layers.initialization import ResidualProjection
from ..layers.norms import RMSNorm
from .configuration import FastWeightsConfig

__all__ = ["FastWeightsBlock"]


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x)"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = ResidualProjection(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FastWeightsBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the second part is missing where intermediate_size is 0."""

    def __init__(self, config: FastWeightsConfig, layer_idx: int) -> None:
        super().__init__()
        name, options = config.mixer_of(layer_idx)
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = build_mixer(
            name, hidden_size=config.hidden_size, num_heads=config.num_heads, layer_idx=layer_idx, **options
        )
        self.mlp = None
        if config.intermediate_size:
            self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self, x_BTD: Tensor, past_key_values: LayerCache | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """past_key_values: this layer's cache, under the name that transformers' checkpointing knows to leave out."""
        x_BTD = x_BTD + self.mixer(self.mixer_norm(x_BTD), cache=past_key_values, cu_seqlens=cu_seqlens)
        return x_BTD if self.mlp is None else x_BTD + self.mlp(self.mlp_norm(x_BTD))
