"""Steps that read one prompt alone, or a piece of it, by replaying a CUDA graph: launching their kernels one by one takes the
host longer than a GPU takes to read some thousand tokens.

A graph has a fixed number of tokens, a power of two. Behind the prompt lies padding, as a sequence of its own whose states go to
row 0 of the pool, which belongs to nobody.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from ...cuda_graphs import captured, padded_prompt
from .memory import Step, current_steps, holds_steps

__all__ = ["PromptGraphs"]

LONGEST = 8192  # with more the GPU takes longer than the host


@dataclass(eq=False)
class Reading:
    """What a graph reads and writes.

    Attributes:
        ids: int32 or int64 [T], the tokens of the prompt, then padding.
        positions: [T], which no memory reads.
        rows: int32 [2] of the pool.
        started: [2], which sequence has states.
        edges: int32 [3].
        hidden: [T, D], the output.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    started: Tensor
    edges: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None

    @classmethod
    def of(cls, width: int, ids: Tensor, positions: Tensor, step: Step) -> Reading:
        edges = torch.full((3,), width, dtype=torch.int32, device=ids.device)
        edges[:1] = 0
        return cls(
            torch.zeros(width, dtype=ids.dtype, device=ids.device),
            torch.zeros(width, dtype=positions.dtype, device=ids.device),
            torch.zeros(2, dtype=step.state_indices_tensor_p.dtype, device=ids.device),
            torch.zeros(2, dtype=torch.bool, device=ids.device),
            edges,
        )

    def fill(self, ids: Tensor, step: Step) -> None:
        tokens = step.num_prefill_tokens
        self.ids.zero_()[:tokens].copy_(ids[:tokens])
        self.rows[:1].copy_(step.state_indices_tensor_p)
        self.started[:1].copy_(step.has_initial_states_p)
        self.edges[1:2].copy_(step.query_start_loc_p[1:])

    def step(self, step: Step) -> Step:
        return replace(
            cast(Any, step),
            num_prefills=2,
            num_prefill_tokens=len(self.ids),
            state_indices_tensor_p=self.rows,
            has_initial_states_p=self.started,
            query_start_loc_p=self.edges,
        )


class PromptGraphs:
    """The readings of a model whose layers are memories.

    Args:
        read: gives hidden states [T, D] for tokens and their positions [T].
        names: of the memory layers in vLLM.
        replayed: graphs are captured. Otherwise the model is called, as in tests on a CPU.
    """

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], names: list[str], replayed: bool = True) -> None:
        self.read_tokens, self.names, self.replayed = read, names, replayed
        self.readings: dict[int, Reading | None] = {}  # None where a graph cannot be captured
        self.pool: Any = None  # what the states are read from

    def read(self, ids: Tensor | None, positions: Tensor) -> Tensor | None:
        """The hidden states [T, D] of a step that reads one prompt of a fitting length, None of others."""
        steps = current_steps()
        step = steps.get(self.names[0])
        if ids is None or step is None or step.num_prefills != 1 or step.num_decode_tokens:
            return None
        width = padded_prompt(step.num_prefill_tokens)
        if not len(ids) <= width <= LONGEST or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        pages = get_forward_context().no_compile_layers[self.names[0]].pages
        if self.pool is not pages:
            self.readings, self.pool = {}, pages
        if width not in self.readings:
            return self._begin(width, ids, positions, step)
        reading = self.readings[width]
        if reading is None:
            return None
        reading.fill(ids, step)
        if reading.graph is None:
            return self._call(reading, step)[: len(ids)]
        reading.graph.replay()
        assert reading.hidden is not None
        return reading.hidden[: len(ids)].clone()  # the next prompt overwrites it

    def clear(self) -> None:
        self.readings = {}

    def _call(self, reading: Reading, step: Step) -> Tensor:
        with holds_steps(dict.fromkeys(self.names, reading.step(step))):
            return self.read_tokens(reading.ids, reading.positions)

    def _begin(self, width: int, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """Read by calling the model, and capture this for the next prompts."""
        reading = Reading.of(width, ids, positions, step)
        reading.fill(ids, step)
        hidden = self._call(reading, step)[: len(ids)]
        self.readings[width] = reading
        if self.replayed:
            try:
                reading.graph, reading.hidden = captured(lambda: self._call(reading, step), ids.device)
            except RuntimeError as error:
                self.readings[width] = None
                warnings.warn(f"prompts of {width} tokens are read without a CUDA graph: {error}", stacklevel=2)
        return hidden
