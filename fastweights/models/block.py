"""One block of a language model: a sequence mixer, then an MLP, each after a norm and added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layers import LayerCache, build_mixer
from ..layers.few_rows import joins, linear_together
from ..layers.initialization import ResidualProjection
from ..layers.norms import RMSNorm, norm_of_sum
from ..ops.linear_rows import linear_rows
from ..ops.silu_product import silu_product
from .configuration import FastWeightsConfig

__all__ = ["FastWeightsBlock"]


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x)"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = ResidualProjection(intermediate_size, hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result, added to the residual where one is given."""
        if joins(x, self.gate_proj, self.up_proj, self.down_proj):
            (h,) = linear_rows(x, self.gate_proj.weight, self.up_proj.weight, kind="swiglu")
            if residual is not None and residual.dtype == h.dtype:
                return linear_rows(h, self.down_proj.weight, kind="add", other=residual)[0]
        else:
            h = silu_product(*linear_together(x, self.gate_proj, self.up_proj))
        y = self.down_proj(h)
        return y if residual is None else residual + y


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
        x_BTD, normed_BTD = norm_of_sum(self.mixer_norm, x_BTD, None)
        mixed_BTD = self.mixer(normed_BTD, cache=past_key_values, cu_seqlens=cu_seqlens)
        if self.mlp is None:
            return x_BTD + mixed_BTD
        x_BTD, normed_BTD = norm_of_sum(self.mlp_norm, x_BTD, mixed_BTD)
        return self.mlp(normed_BTD, x_BTD)
