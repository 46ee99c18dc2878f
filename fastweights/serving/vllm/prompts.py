"""Steps with prefills, beside decodes or alone, by replaying a CUDA graph: launching their kernels one by one takes the host
longer than a GPU takes to read some thousand tokens. A decode is a sequence that reads one token more, a prefill one that reads a
prompt or a piece of it, as vLLM says.

A graph has fixed numbers of tokens and sequences. Behind the decodes lies padding with row 0 of the pool, which belongs to
nobody. Behind the prefills lies padding as a sequence of its own, whose states go to row 0.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from ...cuda_graphs import captured, is_capturing, padded_prompt
from .memory import Step, current_steps, holds_steps

__all__ = ["PromptGraphs"]

LONGEST = 8192  # tokens of the prefills of a step; with more the GPU takes longer than the host
DECODES = (0, 16, 64, 256)  # in a graph
PREFILLS = (1, 7)  # likewise, without the padding
MOST = 32  # graphs that are kept, beyond which steps are launched one by one


class Sizes(NamedTuple):
    """Of a graph: its decodes, its prefills, and the tokens of the prefills, all with padding."""

    decodes: int
    prefills: int
    tokens: int

    @classmethod
    def of(cls, step: Step) -> Sizes | None:
        """The smallest ones that hold a step; None where the step has no prefill or is too large."""
        large = step.num_decodes > DECODES[-1] or step.num_prefills > PREFILLS[-1] or step.num_prefill_tokens > LONGEST
        if large or not step.num_prefills:
            return None
        decodes = min(n for n in DECODES if n >= step.num_decodes)
        prefills = min(n for n in PREFILLS if n >= step.num_prefills)
        return cls(decodes, prefills, padded_prompt(step.num_prefill_tokens))


@dataclass(eq=False)
class Reading:
    """What a graph reads and writes.

    Attributes:
        sizes: of the graph.
        ids: int32 or int64 [N + T], the tokens of N decodes, padding, the tokens of P prefills, padding.
        positions: [N + T], which no memory reads.
        decode_rows: int32 [N, 1] of the pool.
        rows: int32 [P + 1] of the pool, of the prefills.
        started: [P + 1], which of them have states.
        edges: int32 [P + 2], of their tokens.
        hidden: [N + T, D], the output.
    """

    sizes: Sizes
    ids: Tensor
    positions: Tensor
    decode_rows: Tensor
    rows: Tensor
    started: Tensor
    edges: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None

    @classmethod
    def of(cls, sizes: Sizes, ids: Tensor, positions: Tensor) -> Reading:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=ids.device)

        count, tokens = sizes.prefills + 1, sizes.decodes + sizes.tokens
        return cls(
            sizes, zeros(tokens, dtype=ids.dtype), zeros(tokens, dtype=positions.dtype), zeros(sizes.decodes, 1),
            zeros(count), zeros(count, dtype=torch.bool), zeros(count + 1),
        )  # fmt: skip

    def fill(self, ids: Tensor, step: Step) -> None:
        decodes, count = step.num_decodes, step.num_prefills
        self.ids.zero_()
        for ours, theirs in self._places(step):
            self.ids[ours].copy_(ids[theirs])
        self.decode_rows.zero_()
        if decodes:
            self.decode_rows[:decodes].copy_(step.state_indices_tensor_d[:decodes, :1])
        self.rows.zero_()[:count].copy_(step.state_indices_tensor_p)
        self.started.zero_()[:count].copy_(step.has_initial_states_p)
        # Sequences that are not there have no tokens, the last one has the padding.
        self.edges[: count + 1].copy_(step.query_start_loc_p)
        self.edges[count + 1 : -1].fill_(step.num_prefill_tokens)
        self.edges[-1:].fill_(self.sizes.tokens)

    def _places(self, step: Step) -> list[tuple[slice, slice]]:
        """Of the decodes' tokens, and of the prefills', in the graph and in the step."""
        decodes, tokens, first = step.num_decodes, step.num_prefill_tokens, self.sizes.decodes
        return [
            (slice(decodes), slice(decodes)),
            (slice(first, first + tokens), slice(decodes, decodes + tokens)),
        ]

    def step(self, step: Step) -> Step:
        return replace(
            cast(Any, step),
            num_decodes=self.sizes.decodes,
            num_decode_tokens=self.sizes.decodes,
            state_indices_tensor_d=self.decode_rows,
            num_prefills=len(self.rows),
            num_prefill_tokens=self.sizes.tokens,
            state_indices_tensor_p=self.rows,
            has_initial_states_p=self.started,
            query_start_loc_p=self.edges,
        )

    def output(self, hidden: Tensor, step: Step, tokens: int) -> Tensor:
        """Of a step with so many tokens, in tensors of its own: the next replay overwrites `hidden`."""
        found = hidden.new_zeros(tokens, hidden.shape[1])
        for ours, theirs in self._places(step):
            found[theirs] = hidden[ours]
        return found


class PromptGraphs:
    """The readings of a model whose layers are memories.

    Args:
        model: its `forward` gives hidden states [T, D] for tokens and their positions [T]. It is called as it is: what vLLM has
            compiled of it refuses the padding of a step that has as many tokens as a step may have.
        names: of the memory layers in vLLM.
        drafted: decodes have drafts. Only steps of prefills alone are read here then.
        replayed: graphs are captured. Otherwise the model is called, as in tests on a CPU.
    """

    def __init__(self, model: torch.nn.Module, names: list[str], drafted: bool = False, replayed: bool = True) -> None:
        self.model, self.names, self.drafted, self.replayed = model, names, drafted, replayed
        self.readings: dict[Sizes, Reading | None] = {}  # None where a graph cannot be captured
        self.memory: Any = None  # of all graphs, which are replayed one after another
        self.pool: Any = None  # what the states are read from

    def clear(self) -> None:
        self.readings, self.memory = {}, None

    def read(self, ids: Tensor | None, positions: Tensor) -> Tensor | None:
        """The hidden states [T, D] of a step with prefills of a fitting size, None of others."""
        steps = current_steps()
        step = steps.get(self.names[0])
        if ids is None or step is None or is_capturing():
            return None
        pages = get_forward_context().no_compile_layers[self.names[0]].pages
        if self.pool is not pages:
            self.clear()
            self.pool = pages
        sizes = None if self.drafted and step.num_decodes else Sizes.of(step)
        if sizes is None or (sizes not in self.readings and len(self.readings) == MOST):
            return None
        if sizes not in self.readings:
            return self._begin(sizes, ids, positions, step)
        reading = self.readings[sizes]
        if reading is None:
            return None
        reading.fill(ids, step)
        if reading.graph is None:
            return reading.output(self._call(reading, step), step, len(ids))
        reading.graph.replay()
        assert reading.hidden is not None
        return reading.output(reading.hidden, step, len(ids))

    def _call(self, reading: Reading, step: Step) -> Tensor:
        with holds_steps(dict.fromkeys(self.names, reading.step(step))):
            return self.model.forward(reading.ids, reading.positions)

    def _begin(self, sizes: Sizes, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """Read by calling the model, and capture this for the next steps."""
        reading = self.readings[sizes] = Reading.of(sizes, ids, positions)
        reading.fill(ids, step)
        hidden = reading.output(self._call(reading, step), step, len(ids))
        if self.replayed:
            try:
                self.memory = self.memory or torch.cuda.graph_pool_handle()
                call = partial(self._call, reading, step)
                reading.graph, reading.hidden = captured(call, ids.device, self.memory)
            except RuntimeError as error:
                self.readings[sizes] = None
                warnings.warn(
                    f"steps with {sizes.prefills} prefills of {sizes.tokens} tokens beside {sizes.decodes} decodes are read "
                    f"without a CUDA graph: {error}",
                    stacklevel=2,
                )
        return hidden
