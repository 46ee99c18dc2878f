"""Way "state": every rank keeps its tokens, and the ranks pass on the states of the sequences that cross their borders.

A part takes the state before it to M S + E (see framework/passing.py). Each rank computes its M and E, one all-gather brings them
to all, and a rank applies those of the ranks before it in their order. What travels does not grow with the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..framework.checks import Sizes, as_tuple, check_options, compute_dtype, expand_parameter, first_state, unwrap
from ..framework.in_torch import disable_autocast, expand_heads, first_input
from ..framework.passing import Passing, Summary, Transition
from ..framework.spec import OpSpec
from .by_kernels import PartKernels, part_kernels
from .collectives import all_gather
from .costs import most_columns
from .documents import Rows, fold, sequences_of_part
from .group import ContextParallel

__all__ = ["run_by_state"]

Named = Mapping[str, Any]


def run_by_state(
    call: Callable[..., tuple[Any, Any]], spec: OpSpec, cp: ContextParallel, sizes: Sizes, given: tuple[Any, ...]
) -> tuple[Any, Any]:
    """As `run_divided`."""
    inputs, options, before, final, cu_seqlens, backend = given
    states = dict.fromkeys(spec.states) if before is None else dict(zip(spec.states, as_tuple(before)))
    device = inputs[0].device
    count = sizes.B if cu_seqlens is None else len(cu_seqlens) - 1
    sequences = sequences_of_part(cp, cu_seqlens, sizes.T, device)
    most = most_columns(spec, inputs[0], backend)
    named = dict(zip(spec.inputs, inputs))
    part = _Part(call, spec, named, options, states, sizes, count, sequences, cu_seqlens, backend, cp, most)
    with disable_autocast(device):
        outputs, after = part.run(final)
    return outputs, tuple(after) if final else None


@dataclass(eq=False)
class _Part:
    """A call on one rank's part of the tokens. initial: the states before the first token of each of `count` sequences, or None;
    cu_seqlens: of the whole row; most: value columns of one call."""

    call: Callable[..., tuple[Any, Any]]
    spec: OpSpec
    inputs: Named
    options: Named
    initial: Named
    sizes: Sizes
    count: int
    sequences: Rows
    cu_seqlens: Tensor | None
    backend: str
    cp: ContextParallel
    most: int

    @property
    def passing(self) -> Passing:
        assert self.spec.passing is not None
        return self.spec.passing

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(first_input(self.inputs))

    def run(self, final: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        states = self.pass_sums()
        transitions = [(name, way) for name, way in self.passing.states.items() if isinstance(way, Transition)]
        if transitions:
            outputs, ends = self.pass_by_transition(*transitions[0], states, final)
        else:
            outputs, ends = self.call_op(self.inputs, states, final)
        return outputs, [self.sequences.collect_final(x) for x in ends.values()] if final else ()

    def call_op(self, inputs: Named, states: Named, final: bool) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The op on this part alone, from these states."""
        before = unwrap([states[name] for name in self.spec.states])
        given = list(inputs.values()), self.options, before, final, self.sequences.cu_seqlens, self.backend
        o, after = self.call(self.spec, *given)
        return as_tuple(o), dict(zip(self.spec.states, as_tuple(after))) if final else {}

    def pass_sums(self) -> dict[str, Tensor]:
        """The states before this part [N, ...] of those that are sums."""
        sums, sequences = self.passing.sums, self.sequences
        found = []
        for name, way in sums.items():
            dtype = way.dtype or self.dtype
            tokens = {n: self.inputs[n] for n in way.inputs}
            tokens = {n: None if x is None else expand_heads(x.to(dtype), self.sizes.G) for n, x in tokens.items()}
            added, kept = way.summarize(tokens, sequences.leaves_from)
            kept = kept.view(*kept.shape, *[1] * (added.ndim - kept.ndim))
            start = self.initial[name]
            begun = way.begin(
                added.shape, None if start is None else sequences.pick_leaving(start), added, self.options
            )
            found.append(Summary(added + sequences.begins_here(kept * begun), kept))
        states = {}
        for (name, way), (added, kept) in zip(sums.items(), self.gather_summaries(found)):
            entering = way.state_of(fold(sequences, added, kept, torch.mul), self.options).to(self.dtype)
            start = self.initial[name]
            if start is None:
                start = way.state_of(way.begin((1, *added.shape[2:]), None, added, self.options), self.options)
                start = start.expand(self.count, *start.shape[1:])
            states[name] = sequences.place(start.to(self.dtype), entering)
        return states

    def gather_summaries(self, summaries: Sequence[Summary]) -> list[Summary]:
        """Those of all ranks [size, R, ...], by one exchange: all are of one dtype."""
        tensors = [x for summary in summaries for x in summary]
        if not tensors:
            return []
        flat = all_gather(torch.cat([x.flatten(1) for x in tensors], 1), self.cp)
        parts = flat.split([x[0].numel() for x in tensors], -1)
        whole = [part.unflatten(-1, x.shape[1:]) for part, x in zip(parts, tensors)]
        return [Summary(*pair) for pair in zip(whole[::2], whole[1::2])]

    def pass_by_transition(
        self, name: str, way: Transition, states: Named, final: bool
    ) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The outputs of this part, and its final states [N, ...]."""
        sequences, v, start = self.sequences, self.inputs[way.values], self.initial[name]
        if start is None:
            start = first_state(self.spec, name, self.sizes, self.count, v)
        start = start.to(self.dtype)
        by_kernels = part_kernels(self.spec, v, self.backend)
        if by_kernels is not None:
            before = {**states, name: sequences.place(start, torch.zeros_like(sequences.pick_entering(start)))}
            return self.run_kernels(by_kernels, before)
        K, V = start.shape[-2:]
        identity = torch.eye(K, dtype=start.dtype, device=start.device).expand(*start.shape[:-2], K, K)
        unit = sequences.place(torch.zeros_like(identity), sequences.pick_entering(identity))
        start = sequences.place(start, torch.zeros_like(sequences.pick_entering(start)))
        zeros = v.new_zeros(()).expand(*v.shape[:-1], K)
        run = partial(self.run_columns, name, way, states)
        if self.most < V + K:
            (o, own, ends), (answers, M, _) = run(v, start), run(zeros, unit)
        else:
            o, own, ends = run(torch.cat([v, zeros], -1), torch.cat([start, unit], -1))
            (o, answers), (own, M) = o.split([V, K], -1), own.split([V, K], -1)
        gathered = all_gather(torch.cat([sequences.pick_leaving(own), sequences.pick_leaving(M)], -1), self.cp)
        added, kept = gathered.split([V, K], -1)
        state = fold(sequences, added, kept, torch.matmul)
        o = o + sequences.of_entering(torch.einsum("rtgk,rgkv->rtgv", answers, state.to(answers.dtype)))
        if final:
            change = (sequences.pick_entering(M).double() @ state.double()).to(own.dtype)
            ends = {**ends, name: own + sequences.place(torch.zeros_like(own), change)}
        return (o,), ends

    def run_kernels(self, part: PartKernels, states: Named) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        spec, like = self.spec, first_input(self.inputs)
        named = dict(self.inputs)
        for name, role in spec.parameters.items():
            named[name] = expand_parameter(named[name], role, self.sizes, like)
        options = check_options(spec, self.options, self.sizes)
        tensors = (*named.values(), *(states[name] for name in spec.states), self.cu_seqlens)
        results = part(tensors, tuple(options.values()), self.cp)
        count = len(spec.outputs)
        return results[:count], dict(zip(spec.states, results[count:]))

    def run_columns(
        self, name: str, way: Transition, states: Named, v: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The op on other values from another state: its output, the final state, and all final states."""
        (o,), ends = self.call_op({**self.inputs, way.values: v}, {**states, name: start}, True)
        return o, ends[name], ends
