"""The backend of Triton kernels, which take the inputs as they are: they handle dtypes, heads, scale and NaN themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...kernels.runtime.launch_plan import align, device_of, plans_for
from ..context_parallel.by_kernels import PartKernels
from .node import Tensors, declare_node, load_module
from .spec import OpSpec

__all__ = ["KernelFamily", "defer_family", "kernels"]


class KernelFamily(NamedTuple):
    """Launch code of one family of kernels.

    Attributes:
        rule: what it launches.
        inputs: the named tuple that the rule takes. Its fields have the names of the op's inputs and states.
        options: the options that the rule takes, in order. Each has the value that it takes where the op has no such option.
    """

    rule: Any
    inputs: Any
    options: Mapping[str, Any]


def defer_family(module: str, rule: str, inputs: str, **options: Any) -> Callable[[], KernelFamily]:
    """A loader for `kernels`: it imports a module of fastweights.kernels, in which the rule and its inputs have these names."""

    def load() -> KernelFamily:
        loaded = load_module(module)
        return KernelFamily(getattr(loaded, rule), getattr(loaded, inputs), options)

    return load


@dataclass(eq=False)
class kernels:
    """The backend "triton". For calls that its kernels do not take, "auto" takes the chunkwise form.

    Args:
        load: imports the family. It is called at the first launch: before, nothing of triton is imported.
        only: for options of which the kernels have some values only, these values, the default first.
        widest: the most key or value channels that the kernels take; None for no limit.
        widest_in_float32: that number in float32, where it is smaller.
        has_part: whether the family has the rules of `PartKernels`.
    """

    load: Callable[[], KernelFamily]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    widest: int | None = None
    widest_in_float32: int | None = None
    has_part: bool = False

    def most_channels(self, dtype: torch.dtype) -> int | None:
        return self.widest_in_float32 or self.widest if dtype == torch.float32 else self.widest

    @cached_property
    def family(self) -> KernelFamily:
        return self.load()

    @cached_property
    def places(self) -> list[int]:
        """Where each input of the family stands among the tensors of the node; one past the last, None, where it does not."""
        names = (*self.spec.inputs, *self.spec.states, "cu_seqlens")
        return [names.index(name) if name in names else len(names) for name in self.family.inputs._fields]

    def bind(self, spec: OpSpec, backend: str) -> None:
        self.spec = spec
        self.outputs = len(spec.outputs) + len(spec.states)
        self.node = declare_node(spec, backend, self, final="bool")
        self.part = PartKernels(spec, self) if self.has_part else None

    def run(self, x: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """The outputs and the final states of checked `Arguments`; the states mean nothing unless `x.final`."""
        given = (*x.inputs.values(), *x.states.values(), x.cu_seqlens)
        like, cu_seqlens = given[0], x.cu_seqlens
        if cu_seqlens is not None:
            given = (*given[:-1], cu_seqlens.to(like.device, non_blocking=True))
        if torch.compiler.is_compiling():
            tensors = [t if t is None else t.contiguous() for t in given]
            results = self.node(tensors, (*x.options.values(), x.final))
            return results[: len(self.spec.outputs)], results[len(self.spec.outputs) :]
        with device_of(like):
            results = self.node([align(t) for t in given], (*x.options.values(), x.final))
        return results[: len(self.spec.outputs)], results[len(self.spec.outputs) :]

    # As the rule of a node: see `NodeRule`.

    def _plans(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Any, Any]:
        family, given = self.family, [*map(align, tensors), None]
        inputs = family.inputs._make([given[place] for place in self.places])
        return inputs, plans_for(family.rule, inputs, self._order_options(options), final=options[-1], keep_saved=save)

    def _order_options(self, options: Sequence[Any]) -> tuple[Any, ...]:
        """The options of the node in the order in which the family takes them."""
        named = dict(zip(self.spec.options, options))
        return tuple([named.get(name, default) for name, default in self.family.options.items()])

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        inputs, plans = self._plans(tensors, options, save)
        found = plans.forward.run(inputs)
        rest = len(found) - len(plans.recorded[2]) if save else len(found)
        return found[: self.outputs], found[rest:]

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        like = tensors[0]
        assert like is not None
        inputs = self.family.inputs._make(map((*tensors, None).__getitem__, self.places))
        outputs, saved = self.family.rule.shapes(inputs, like.device, self._order_options(options), options[-1])
        made = [[x if x is None else x.allocate(like.device) for x in specs] for specs in (outputs, saved)]
        return made[0][: self.outputs], made[1]

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        like = tensors[0]
        assert like is not None
        first_state = len(self.spec.inputs)
        with device_of(like):
            inputs, plans = self._plans(tensors, options, True)
            outputs = plans.recorded[1]
            grads = [None if g is None or not g.numel() else align(g) for g in output_grads]
            if grads[0] is None:
                grads[0] = torch.zeros(outputs[0].shape, dtype=outputs[0].dtype, device=like.device)
            grads += [None] * (len(outputs) - len(grads))
            kept = [align(x) for x in saved]
            found = plans.backward(inputs, kept, grads, any(needed[first_state:-1]))
        by_place = dict(zip(self.places, found))
        return [by_place[place] if need else None for place, need in enumerate(needed)]
