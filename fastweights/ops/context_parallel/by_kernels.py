"""Way "state" of the delta rules by kernels, which know what their part does to a state before they need the state itself.

One node with both exchanges inside: forward [E | M] goes to all ranks, backward dE. M needs no gradient of its own, because the
backward asks what the part does to the gradient of a state in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ...kernels.runtime.launch_plan import align, device_of, plans_for, reduce_to_input
from ..framework.node import Tensors, declare_node, load_module
from ..framework.spec import OpSpec
from .collectives import all_gather
from .documents import Rows, fold, fold_back, sequences_of_part
from .group import ContextParallel, group_of

__all__ = ["PartKernels", "part_kernels"]


def part_kernels(spec: OpSpec, x: Tensor, backend: str) -> PartKernels | None:
    """The kernels of an op that find the map of their part, where they serve an input x; on "meta" as on a GPU."""
    takes = backend == "triton" or (backend == "auto" and (x.is_meta or takes_kernels("auto", x)))
    return getattr(spec.backends.get("triton"), "part", None) if takes else None


class PartKernels:
    """The rule of a node that takes this rank's part of the tokens, the states of sequences that begin here, cu_seqlens of the
    whole row, and after the op's options the name and the size of the group. It returns the part's outputs and final states.

    Args:
        backend: the op's `kernels`, whose family has delta rules.
    """

    def __init__(self, spec: OpSpec, backend: Any) -> None:
        self.backend, self.outputs = backend, len(spec.outputs) + len(spec.states)
        self.node = declare_node(spec, "triton_part", self, group="str", ranks="int")

    def __call__(self, tensors: Tensors, options: Sequence[Any], cp: ContextParallel) -> list[Any]:
        like = tensors[0]
        assert like is not None
        options = (*options, cp.name, cp.size)
        if torch.compiler.is_compiling():
            return self.node([x if x is None else x.contiguous() for x in tensors], options)
        with device_of(like):
            return self.node([*map(align, tensors)], options)

    def _prepare(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Any, Any, Rows, Any]:
        """The rules, the inputs that they take, the sequences, and the plans of a rule for its inputs."""
        *given, cu_seqlens = tensors
        like, (*plain, name, _) = given[0], options
        assert like is not None
        sequences = sequences_of_part(ContextParallel(group_of(name)), cu_seqlens, like.shape[1], like.device)
        local = sequences.cu_seqlens
        given = [*map(align, given), None if local is None else align(local.to(like.device, non_blocking=True)), None]
        rules = load_module("chunk.parts")
        inputs = rules.KernelInputs._make([given[place] for place in self.backend.places])
        ordered = self.backend._order_options(plain)

        def run(rule: Any, x: Any) -> list[Any]:
            return plans_for(rule, x, ordered, final=True, keep_saved=True).forward.run(x)

        return rules, inputs, sequences, run

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        rules, x, sequences, run = self._prepare(tensors, options)
        E, M, A_end, *kept = run(rules.BEGIN, x)
        V, K = E.shape[-1], M.shape[-1]
        both = torch.cat([sequences.pick_leaving(E), sequences.pick_leaving(M)], -1)
        added, passed = all_gather(both, sequences.cp).split([V, K], -1)
        state = fold(sequences, added, passed, torch.matmul)
        start = sequences.place(torch.zeros_like(E) if x.S is None else x.S, state)
        o, S_end = run(rules.FINISH, rules.PartInputs(*x._replace(S=align(start)), *kept))
        return [o, S_end, A_end][: self.outputs], [
            *kept[: len(kept) - len(rules.Operands._fields)],
            passed.contiguous(),
        ]

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        *given, cu_seqlens = tensors
        like, (*plain, _, ranks), rules = given[0], options, load_module("chunk.parts")
        assert like is not None
        inputs = rules.KernelInputs._make([[*given, cu_seqlens, None][place] for place in self.backend.places])
        ordered = self.backend._order_options(plain)
        (E, M, A), kept = rules.BEGIN.shapes(inputs, like.device, ordered, True)
        saved = kept[: len(kept) - len(rules.Operands._fields)]
        made = [x if x is None else x.allocate(like.device) for x in (E, A, *saved)]
        passed = like.new_empty((ranks, *(M.shape if cu_seqlens is None else (1, *M.shape[1:]))), dtype=M.dtype)
        o = like.new_empty((*like.shape[:2], *inputs.v.shape[2:]))
        return [o, *made[:2]][: self.outputs], [*made[2:], passed]

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        like = tensors[0]
        assert like is not None
        with device_of(like):
            rules, x, sequences, run = self._prepare(tensors, options)
            *kept, passed = saved
            assert passed is not None
            do, dS_end, dA_end = (*(None if g is None else align(g) for g in output_grads), None)[:3]
            do = x.v.new_zeros(x.v.shape) if do is None else do
            before = [*x, *map(align, kept)]
            none = [None] * len(rules.Operands._fields)
            dE, *found = run(rules.BEGIN_BACK, rules.PartInputs(*before, *none, do, dS_end, dA_end))
            gathered = all_gather(sequences.pick_entering(dE), sequences.cp)
            behind = sequences.place_leaving(fold_back(sequences, gathered, passed), len(dE))
            dS_end = align(behind if dS_end is None else dS_end + behind)
            operands, rest = found[: len(none)], found[len(none) :]
            back = rules.PartInputs(*before, *operands, do, dS_end, dA_end, *rest)
            grads = [reduce_to_input(a, g) for a, g in zip(x, run(rules.FINISH_BACK, back))]
        by_place = dict(zip(self.backend.places, grads))
        return [by_place[place] if need else None for place, need in enumerate(needed)]
