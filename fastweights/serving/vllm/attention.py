"""Softmax attention in vLLM: our layer's projections, norms and rotation around vLLM's own attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention

from ...layers import SoftmaxAttention
from ...layers.attention import rotate, rotation

__all__ = ["ServedAttention"]


class ServedAttention(Attention):
    """Args:
    mixer: the layer, which stays a module of its block.
    name: of the layer in vLLM.
    """

    def __init__(self, mixer: SoftmaxAttention, name: str) -> None:
        super().__init__(
            mixer.options.num_heads,
            mixer.head_dim,
            mixer.head_dim**-0.5,
            num_kv_heads=mixer.num_kv_heads,
            cache_config=get_current_vllm_config().cache_config,
            per_layer_sliding_window=mixer.window,
            prefix=name,
        )
        # On a CPU vLLM would notice at the first request, and end.
        if not self.attn_backend.supports_head_size(mixer.head_dim):
            sizes = ", ".join(map(str, self.attn_backend.get_supported_head_sizes()))
            raise ValueError(f"head_dim of softmax layers must be one of {sizes} in vLLM here, got {mixer.head_dim}")

    def mix(self, mixer: Any, x_TD: Tensor, position_T: Tensor) -> Tensor:
        """The output of the layer for the tokens of a step."""
        width = mixer.head_dim
        q_THK = mixer.q_norm(mixer.q_proj(x_TD).unflatten(1, (-1, width)))
        k_THK = mixer.k_norm(mixer.k_proj(x_TD).unflatten(1, (-1, width)))
        if mixer.rope_theta is not None:
            cos, sin = (y[0] for y in rotation(position_T[None], width, mixer.rope_theta, x_TD.dtype))
            q_THK, k_THK = rotate(q_THK, cos, sin), rotate(k_THK, cos, sin)
        o_TD = self(q_THK.flatten(1), k_THK.flatten(1), mixer.v_proj(x_TD))
        return mixer.o_proj(o_TD)
