"""How much vLLM reserves for the states of one sequence in a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...layers import SoftmaxAttention, build_mixer
from .pool import Layout
from .split import part_of_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["STATE_DTYPES", "StateBlock"]

# By vLLM's option mamba_ssm_cache_dtype.
STATE_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


class StateBlock(NamedTuple):
    """The states that one sequence has in a layer of a process. All layers reserve alike, as vLLM wants equal blocks.

    Attributes:
        context: bytes of the last inputs of the convolutions.
        memory: bytes of the fast weights.
        dtype: of the fast weights in the pool.
    """

    context: int
    memory: int
    dtype: torch.dtype

    @classmethod
    def largest(cls, vllm_config: VllmConfig) -> StateBlock:
        """What every memory layer of the model fits into."""
        config = part_of_config(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size)
        dtype = STATE_DTYPES[vllm_config.cache_config.mamba_ssm_cache_dtype]
        context = memory = 0
        for name, options in dict((repr(mixer), mixer) for mixer in config.mixers()).values():
            with torch.device("meta"):
                mixer = build_mixer(
                    name, hidden_size=config.hidden_size, num_heads=config.num_heads, layer_idx=0, **options
                )
            if not isinstance(mixer, SoftmaxAttention):
                layout = Layout(mixer.state_spec(vllm_config.model_config.dtype), dtype)
                memory = max(memory, layout.memory_size)
                context = max(context, layout.size - layout.memory_size)
        return cls(context, memory, dtype)

    @property
    def size(self) -> int:
        return self.context + self.memory

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.context,), (self.memory // self.dtype.itemsize,)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.uint8, self.dtype
