"""Way "state": every rank keeps its tokens, and the ranks pass on the states of the sequences that cross their borders.

A part takes the state before it to M S + E (see framework/passing.py). Each rank computes its M and E, one all-gather brings them
to all, and a rank applies those of the ranks before it in their order. What travels does not grow with the length. The chain of
products is in float64, whatever precision products of float32 have been set to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checks import LARGEST_HEAD
from ..framework import checks
from ..framework.call import as_tuple, call, choose_backend, unwrap
from ..framework.checks import Sizes, compute_dtype
from ..framework.in_torch import disable_autocast, expand_heads
from ..framework.passing import Passing, Summary
from ..framework.spec import OpSpec, Role
from .collectives import all_gather
from .documents import Rows, sequences_of_part
from .group import ContextParallel

__all__ = ["passes_states", "run_by_state"]

Named = Mapping[str, Any]


def passes_states(spec: OpSpec, inputs: Sequence[Any]) -> bool:
    """Whether way "state" serves a call with these inputs."""
    return spec.passing is not None and spec.passing.serves(dict(zip(spec.inputs, inputs)))


def run_by_state(
    spec: OpSpec, inputs: Sequence[Any], options: Named, initial_state: Any, output_final_state: bool,
    cu_seqlens: Tensor | None, backend: str, cp: ContextParallel,
) -> tuple[Any, Any]:  # fmt: skip
    """What `call` returns for the whole sequences: the outputs of this rank's part, and the final states of all of it."""
    sizes = checks.check_inputs(spec, inputs)
    given = checks.check_options(spec, options, sizes)
    count = sizes.B if cu_seqlens is None else len(cu_seqlens) - 1
    initial = checks.check_states(spec, initial_state, sizes, count, inputs[0])
    sequences = sequences_of_part(cp, cu_seqlens, sizes.T, inputs[0].device)
    with disable_autocast(inputs[0].device):
        part = _Part(spec, dict(zip(spec.inputs, inputs)), sizes, given, initial, sequences, count, backend, cp)
        outputs, final = part.run(output_final_state)
    return unwrap(outputs), unwrap(final) if output_final_state else None


@dataclass(eq=False)
class _Part:
    """A call on one rank's part of the tokens. initial: the states before the first token of each of `count` sequences, or None."""

    spec: OpSpec
    inputs: Named
    sizes: Sizes
    options: Named
    initial: Named
    sequences: Rows
    count: int
    backend: str
    cp: ContextParallel

    @property
    def passing(self) -> Passing:
        assert self.spec.passing is not None
        return self.spec.passing

    def run(self, final: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        states = self.pass_sums()
        passed = self.passing.transition
        if passed is None:
            outputs, ends = self.call_op(self.inputs, states, final)
        else:
            outputs, ends = self.pass_by_transition(*passed, states, final)
        return outputs, [self.sequences.collect_final(x) for x in ends.values()] if final else ()

    def call_op(self, inputs: Named, states: Named, final: bool) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The op on this part alone, from these states."""
        given = [states[name] for name in self.spec.states]
        o, end = call(
            self.spec, list(inputs.values()), self.options, unwrap(given), final, self.sequences.cu_seqlens, self.backend
        )  # fmt: skip
        return as_tuple(o), dict(zip(self.spec.states, as_tuple(end))) if final else {}

    def first(self, name: str) -> Tensor:
        """The initial states [N, ...] of all sequences."""
        x = self.initial[name]
        return checks.first_state(self.spec, name, self.sizes, self.count, self.like) if x is None else x

    @property
    def like(self) -> Tensor:
        return next(iter(self.inputs.values()))

    def pass_sums(self) -> dict[str, Tensor]:
        """The states before this part [N, ...] of those that are sums."""
        sums, sequences = self.passing.sums, self.sequences
        found = {}
        for name, way in sums.items():
            dtype = way.dtype or compute_dtype(self.like)
            names = (way.x, way.y, way.gain, way.decay)
            tokens = {n: x for n, x in self.inputs.items() if n in names and x is not None}
            tokens = {n: expand_heads(x.to(dtype), self.sizes.G) for n, x in tokens.items()}
            added, kept = way.summarize({**dict.fromkeys(names), **tokens}, sequences.leaves_from)
            kept = kept.view(*kept.shape, *[1] * (added.ndim - kept.ndim))
            start = self.initial[name]
            start = way.begin(None if start is None else sequences.pick_leaving(start), added, self.options)
            found[name] = Summary(added + sequences.begins_here(kept * start), kept)
        states = {}
        for (name, way), (added, kept) in zip(sums.items(), self.gather_summaries(list(found.values()))):
            total = self.fold(added, kept, torch.mul)
            state = way.state_of(total, self.options).to(compute_dtype(self.like))
            states[name] = sequences.place(self.first(name), state)
        return states

    def gather_summaries(self, summaries: Sequence[Summary]) -> list[Summary]:
        """Those of all ranks [size, R, ...], by one exchange for each dtype."""
        tensors = [x for summary in summaries for x in summary]
        if not tensors:
            return []
        flat = all_gather(torch.cat([x.flatten(1) for x in tensors], 1), self.cp)
        parts = flat.split([x[0].numel() for x in tensors], -1)
        whole = [part.unflatten(-1, x.shape[1:]) for part, x in zip(parts, tensors)]
        return [Summary(*pair) for pair in zip(whole[::2], whole[1::2])]

    def fold(self, added: Tensor, kept: Tensor, apply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The state [R, ...] that enters this part, from what the parts before it add and keep [size, R, ...]; zeros where none
        enters."""
        state = torch.zeros_like(added[0], dtype=torch.float64)
        for rank in range(self.cp.rank):
            before = self.sequences.crosses(rank, state)
            state = apply(self.sequences.crosses(rank, kept[rank]).double(), before) + added[rank].double()
        return state.to(added.dtype)

    def pass_by_transition(
        self, name: str, values: str, states: Named, final: bool
    ) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The outputs of this part, and its final states [N, ...]."""
        start, v, sequences = self.first(name), self.inputs[values], self.sequences
        V, K = start.shape[-1], start.shape[-2]
        identity = torch.eye(K, dtype=start.dtype, device=start.device).expand(*start.shape[:-2], K, K)
        nothing = torch.zeros((), dtype=start.dtype, device=start.device)
        start = sequences.place(start, nothing.expand(sequences.pick_entering(start).shape))
        unit = sequences.place(nothing.expand(identity.shape), sequences.pick_entering(identity))
        zeros = v.new_zeros(()).expand(*v.shape[:-1], K)
        run = partial(self._run_columns, name, values, states)
        if V + K > self.widest():
            (o, own, ends), (answers, M, _) = run(v, start), run(zeros, unit)
        else:
            both, joined, ends = run(torch.cat([v, zeros], -1), torch.cat([start, unit], -1))
            o, answers = both.split([V, K], -1)
            own, M = joined.split([V, K], -1)
        gathered = all_gather(torch.cat([sequences.pick_leaving(own), sequences.pick_leaving(M)], -1), self.cp)
        state = self.fold(*gathered.split([V, K], -1), torch.matmul)
        o = o + sequences.of_entering(torch.einsum("rtgk,rgkv->rtgv", answers, state.to(answers.dtype)))
        if final:
            change = (sequences.pick_entering(M).double() @ state.double()).to(own.dtype)
            ends = {**ends, name: own + sequences.place(torch.zeros_like(own), change)}
        return (o,), ends

    def _run_columns(
        self, name: str, values: str, states: Named, v: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        (o,), ends = self.call_op({**self.inputs, values: v}, {**states, name: start}, True)
        return o, ends[name], ends

    def widest(self) -> int:
        """The most value columns that one call takes, by the backend that it would choose for its own."""
        backend = self.spec.backends[
            choose_backend(self.spec, self.backend, self.like, self.options, max(self.sizes.K, self.sizes.V))
        ]
        return getattr(backend, "most_channels", lambda dtype: None)(self.like.dtype) or LARGEST_HEAD
