"""A memory layer in vLLM: any mixer of constant state, with the states of all sequences in vLLM's pool.

What a step reads comes as it comes to vLLM's own recurrent layers: first the sequences that read one token more, then those that
read several or begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata

from ...cuda_graphs import is_capturing
from ...kernels.runtime.overlap import can_overlap, overlapping_launches
from ...layers import LayerCache, Mixer
from ...layers.shared_input import normalize_for
from . import BACKEND, OP
from .drafts import DraftedStep, plan_drafts
from .kept_tokens import Kept, KeptTokens
from .linear import Rows
from .pool import PooledMixer, StateBlock
from .versions import counting_builder, our_backend, pages_of

__all__ = ["FastWeightsBackend", "ServedMemory", "Step", "current_steps", "holds_steps", "overlapped"]


@dataclass
class Step(BaseMambaAttentionMetadata):
    """The sequences of one step and where their states are."""

    kept: Kept | None = None
    planned: tuple[Any, DraftedStep] | None = field(default=None, init=False, repr=False)

    def drafted_step(self, tokens: int) -> DraftedStep:
        """Where so many tokens with drafts are read and written. The first layer computes it for all layers. A graph that is
        captured computes it anew: replays would read what was computed before the capture. So does a copy of this object for
        other rows."""
        rows_NS = self.state_indices_tensor_d
        made_for = tokens, id(rows_NS), is_capturing()
        if self.planned is None or self.planned[0] != made_for:
            # A decode has at most S tokens, so that N S tokens are S of each. Padding of a CUDA graph counts as a decode.
            regular = tokens == self.num_decode_tokens == rows_NS.numel()
            plan = plan_drafts(tokens, rows_NS, self.num_accepted_tokens, self.query_start_loc_d, regular)
            self.planned = made_for, plan
        return self.planned[1]


# The class that gets accepted counts differs between versions.
class StepBuilder(KeptTokens, counting_builder()):  # type: ignore[misc]
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
        rows: shared by the layers of a model.
        name: of the layer in vLLM.
    """

    def __init__(self, mixer: Mixer, block: StateBlock, rows: Rows, name: str) -> None:
        self.mixer, self.block, self.rows, self.name = mixer, block, rows, name
        self.spec = mixer.state_spec()  # before vLLM's linear layers are in the mixer
        self.pages = torch.empty(0)
        self.pooled: PooledMixer | None = None  # vLLM measures memory before it binds the pool
        config = get_current_vllm_config()
        self.drafted = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        layers = config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"the name of a layer must be its own, {name} is taken")
        layers[name] = self

    def normalize(self, mixer: Mixer, norm: Any, x_T1D: Tensor) -> tuple[Tensor, Tensor]:
        return normalize_for(mixer, norm, x_T1D, None)

    def mix(self, mixer: Mixer, x_T1D: Tensor, position_T: Tensor) -> Tensor:
        """The output of the layer for the tokens of a step."""
        y_T1D = None if torch.compiler.is_compiling() else self.decode_apart(x_T1D)
        if y_T1D is not None:
            return y_T1D
        y_T1D = torch.empty_like(x_T1D)
        torch.ops.vllm.fastweights_memory(x_T1D[:, 0], y_T1D[:, 0], self.name)
        return y_T1D

    # What vLLM asks of a layer with states.

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.block.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.block.dtypes

    @property
    def mamba_type(self) -> Any:
        return our_backend(BACKEND)

    @property
    def kv_cache(self) -> tuple[Tensor, ...]:
        """vLLM sees one state of bytes in a page, which prefix caching copies whole."""
        return (self.pages,)

    @kv_cache.setter
    def kv_cache(self, states: list[Tensor]) -> None:
        """vLLM sets an empty list where it takes the pool away, and before 0.27 the views that it made of the pages."""
        if states:
            self.bind_kv_cache(pages_of(states))
        else:
            self.pages, self.pooled = torch.empty(0), None

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache [B, 1, 1, C]: the pages of B blocks, in which the mixer has tensors of its own."""
        self.pages = kv_cache.squeeze(dim=(1, 2))[:, : self.block.size].view(torch.uint8)
        self.pooled = PooledMixer(self.mixer, self.pages, self.block.dtype, self.spec, self.rows.read)
        self.pooled.rehearse(self.drafted)

    def weights_changed(self) -> None:
        if self.pooled is not None:
            self.pooled.weights_changed()

    # The work of a step.

    def begin(self, rows: Tensor) -> None:
        """The sequences with these rows [N] of the pool begin; row 0 stays as it is."""
        if self.pooled is not None:
            self.pooled.begin(rows)

    def rehearse(self, x_TD: Tensor, y_TD: Tensor) -> None:
        """A call without sequences, by which vLLM measures memory."""
        y_TD.copy_(self.mixer(x_TD[None], LayerCache())[0])

    def decode_apart(self, x_T1D: Tensor) -> Tensor | None:
        """The output of a step in which all sequences, padding included, read one token more, or as many with drafts; None in
        other steps."""
        step = current_steps().get(self.name)
        if step is None or not reads_decodes_alone(step):
            return None
        assert self.pooled is not None
        if self.drafted:
            plan = step.drafted_step(len(x_T1D))
            return self.pooled.verify_apart(x_T1D, plan) if plan.regular else None
        rows = step.state_indices_tensor_d[:, 0]
        return self.pooled.decode_apart(x_T1D, rows) if len(rows) == len(x_T1D) else None

    def step(self, x_TD: Tensor, y_TD: Tensor, step: Step) -> None:
        """Read the tokens of a step: what follows them in x and y is padding."""
        assert self.pooled is not None
        decoded, prefilled = step.num_decode_tokens, step.num_prefill_tokens
        if decoded and self.drafted:
            tokens = decoded if prefilled else len(x_TD)
            y_TD[:tokens] = self.pooled.verify(x_TD[:tokens], step.drafted_step(tokens))
        elif decoded:
            rows = step.state_indices_tensor_d[:, 0]  # under a CUDA graph for more sequences, rows of padding too
            y_TD[: len(rows)] = self.pooled.decode(x_TD[: len(rows)], rows)
        if prefilled:
            tokens = slice(decoded, decoded + prefilled)
            rows, started = step.state_indices_tensor_p, step.has_initial_states_p
            with self.rows.read(tokens):
                y_TD[tokens] = self.pooled.prefill(x_TD[tokens], rows, started, step.query_start_loc_p)


def current_steps() -> dict[str, Any]:
    """What the layers read now, by their names; nothing while vLLM measures memory."""
    return get_forward_context().attn_metadata or {}


@contextmanager
def holds_steps(steps: dict[str, Step]) -> Iterator[None]:
    """Layers of these names read these steps meanwhile."""
    context = get_forward_context()
    before, context.attn_metadata = context.attn_metadata, steps
    try:
        yield
    finally:
        context.attn_metadata = before


def reads_decodes_alone(step: Step) -> bool:
    return step.num_decode_tokens > 0 and step.num_prefill_tokens == 0


def overlapped(device: torch.device) -> AbstractContextManager[None]:
    """Decodes are chains of small kernels, as those of `generate()` are."""
    read = (step for step in current_steps().values() if isinstance(step, Step))
    return overlapping_launches(can_overlap(device) and any(map(reads_decodes_alone, read)))


@eager_break_during_capture
def fastweights_memory(x: torch.Tensor, y: torch.Tensor, name: str) -> None:
    layer, step = get_forward_context().no_compile_layers[name], current_steps().get(name)
    if step is None:
        layer.rehearse(x, y)
    else:
        layer.step(x, y, step)


def traced(x: torch.Tensor, y: torch.Tensor, name: str) -> None:
    """In a traced graph, where y is known to change."""


direct_register_custom_op(OP, fastweights_memory, mutates_args=["y"], fake_impl=traced)
