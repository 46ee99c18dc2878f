"""A memory layer in vLLM: any mixer of constant state, with the states of all sequences in vLLM's pool.

What a step reads comes as it comes to vLLM's own recurrent layers: first the sequences that read one token more, then those that
read several or begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ...layers import LayerCache, Mixer
from . import BACKEND, OP
from .pool import PooledMixer, StateBlock

__all__ = ["FastWeightsBackend", "ServedMemory"]


@dataclass
class Step(BaseMambaAttentionMetadata):
    """The sequences of one step and where their states are."""


class StepBuilder(BaseMambaAttentionMetadataBuilder[Step]):
    metadata_cls = Step
    needs_causal_conv1d_metadata = False


class FastWeightsBackend(AttentionBackend):
    """vLLM asks it which builder makes our steps."""

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class ServedMemory(MambaBase):
    """The states of one layer for all sequences, and the calls of its mixer.

    Args:
        mixer: the layer, which stays a module of its block.
        block: what a sequence's states take, the same for all layers of a model.
        name: of the layer in vLLM.
    """

    def __init__(self, mixer: Mixer, block: StateBlock, name: str) -> None:
        self.mixer, self.block, self.name = mixer, block, name
        self.kv_cache = (torch.empty(0),)
        self.pooled: PooledMixer | None = None  # vLLM measures memory before it binds the pool
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"the name of a layer must be its own, {name} is taken")
        layers[name] = self

    def mix(self, mixer: Mixer, x_TD: Tensor, position_T: Tensor) -> Tensor:
        """The output of the layer for the tokens of a step."""
        y_TD = torch.empty_like(x_TD)
        torch.ops.vllm.fastweights_memory(x_TD, y_TD, self.name)
        return y_TD

    # What vLLM asks of a layer with states.

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.block.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.block.dtypes

    @property
    def mamba_type(self) -> Any:
        return MambaAttentionBackendEnum[BACKEND]

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache [B, 1, 1, C]: the pages of B blocks. vLLM sees one state of bytes in each, which prefix caching copies whole;
        the tensors in it are the mixer's own."""
        pages = kv_cache.squeeze(dim=(1, 2))[:, : self.block.size].view(torch.uint8)
        self.kv_cache = (pages,)
        self.pooled = PooledMixer(self.mixer, pages, self.block.dtype)
        self.pooled.rehearse()

    def weights_changed(self) -> None:
        if self.pooled is not None:
            self.pooled.weights_changed()

    # The work of a step.

    def rehearse(self, x_TD: Tensor, y_TD: Tensor) -> None:
        """A call without sequences, by which vLLM measures memory."""
        y_TD.copy_(self.mixer(x_TD[None], LayerCache())[0])

    def step(self, x_TD: Tensor, y_TD: Tensor, step: Step) -> None:
        """Read the tokens of a step: what follows them in x and y is padding."""
        assert self.pooled is not None
        decoded, prefilled = step.num_decode_tokens, step.num_prefill_tokens
        if decoded:
            rows = step.state_indices_tensor_d[:, 0]  # under a CUDA graph for more sequences, rows of padding too
            y_TD[: len(rows)] = self.pooled.decode(x_TD[: len(rows)], rows)
        if prefilled:
            tokens = slice(decoded, decoded + prefilled)
            rows, started = step.state_indices_tensor_p, step.has_initial_states_p
            y_TD[tokens] = self.pooled.prefill(x_TD[tokens], rows, started, step.query_start_loc_p)


@eager_break_during_capture
def fastweights_memory(x: torch.Tensor, y: torch.Tensor, name: str) -> None:
    context = get_forward_context()
    layer, steps = context.no_compile_layers[name], context.attn_metadata
    step = None if steps is None else steps.get(name)
    if step is None:
        layer.rehearse(x, y)
    else:
        layer.step(x, y, step)


def traced(x: torch.Tensor, y: torch.Tensor, name: str) -> None:
    """In a traced graph, where y is known to change."""


direct_register_custom_op(OP, fastweights_memory, mutates_args=["y"], fake_impl=traced)
