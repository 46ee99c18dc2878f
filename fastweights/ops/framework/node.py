"""Functions as nodes of a traced graph: a forward op and a backward op of torch.library with typed schemas, their fakes, and
autograd; and one autograd function for eager calls, which costs a fraction of an op's dispatch.

Traced through, a loop over T/64 chunks would become a graph that grows with T, and packed sequences could not be traced at all,
as their lengths are numbers in a tensor. As a node an op runs as it does eagerly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...private_torch import autograd_inside_op
from .spec import OpSpec, Role

__all__ = [
    "KernelRule",
    "Node",
    "NodeRule",
    "copy_aliases",
    "declare_node",
    "define_op",
    "load_module",
    "register_gradient",
]

LIBRARY = torch.library.Library("fastweights", "FRAGMENT")
Tensors = Sequence[Tensor | None]


class NodeRule(Protocol):
    """What a node computes. `tensors` and `options` come in the order of its schema; a result may be None."""

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        """The outputs and, with `save`, what the backward needs besides the tensors."""

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        """Uninitialised tensors in place of forward's results, from the shapes alone."""

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        """A gradient for each of the tensors; None where it is zero or not needed."""


def load_module(name: str) -> Any:
    """A module of fastweights.kernels, at its first launch: before, nothing of triton is imported."""
    return import_module(f"fastweights.kernels.{name}")


class KernelRule:
    """The rule of a node whose kernels are the functions `forward` and `backward` of a module. They take the tensors and options
    of the node in order, `backward` after the gradients of the outputs.

    Args:
        module: its name in fastweights.kernels.pointwise.
        like: number of the tensor that the output is like, where there is one output.
    """

    def __init__(self, module: str, like: int = 0) -> None:
        self.module, self.like = f"pointwise.{module}", like

    def load(self) -> Any:
        return load_module(self.module)

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        outputs = self.load().forward(*tensors, *options)
        return (outputs,) if isinstance(outputs, Tensor) else outputs, ()

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        x = tensors[self.like]
        assert x is not None
        return (x.new_empty(x.shape),), ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        return self.load().backward(*output_grads, *tensors, *options)


class Node:
    """One function of optional tensors and plain options. tensors: whether each may be None; options: their schema types."""

    def __init__(
        self, name: str, tensors: Mapping[str, bool], options: Mapping[str, str], outputs: int, rule: NodeRule
    ) -> None:
        self.rule, self.width, self.outputs = rule, len(tensors), outputs
        typed = {**{x: "Tensor?" if may_be_none else "Tensor" for x, may_be_none in tensors.items()}, **options}
        arguments = ", ".join(f"{kind} {x}" for x, kind in typed.items())
        self.op = define_op(name, f"({arguments}) -> Tensor[]", self._forward, self._fake)
        register_gradient(name, self._autograd, self._save)
        of_backward = "Tensor[] saved, Tensor?[] output_grads, bool[] needed"
        self.backward_op = define_op(
            f"{name}_backward", f"({arguments}, {of_backward}) -> Tensor[]", self._backward, self._fake_backward
        )

    def __call__(self, tensors: Tensors, options: Sequence[Any]) -> list[Any]:
        """The outputs, eagerly or as a node of the graph that is traced."""
        if torch.compiler.is_compiling():
            return list(map(_or_none, self.op(*tensors, *options)[: self.outputs]))
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return list(_Eager.apply(self, options, *tensors))
        return list(self.rule.forward(tensors, options, False)[0])

    def _split(self, arguments: Sequence[Any]) -> tuple[Tensors, Sequence[Any]]:
        return arguments[: self.width], arguments[self.width :]

    def _forward(self, *arguments: Any) -> list[Tensor]:
        tensors, options = self._split(arguments)
        outputs, saved = self.rule.forward(tensors, options, True)
        return copy_aliases([*outputs, *saved], tensors)

    def _fake(self, *arguments: Any) -> list[Tensor]:
        tensors, options = self._split(arguments)
        outputs, saved = self.rule.fake(tensors, options)
        return _fill_missing([*outputs, *saved], tensors)

    def _save(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        tensors, ctx.options = self._split(inputs)
        ctx.save_for_backward(*tensors, *output[self.outputs :])

    def _autograd(self, ctx: Any, output_grads: Tensors) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.op} has no second derivative; call the op outside torch.compile, with backend='torch'"
            )
        kept = ctx.saved_tensors  # activation checkpointing allows one access only
        tensors, saved = self._split(kept)
        needed = list(ctx.needs_input_grad[: self.width])
        given = [None if g is None else g.contiguous() for g in output_grads[: self.outputs]]
        found = iter(self.backward_op(*tensors, *ctx.options, list(saved), given, needed))
        return *(next(found) if needs else None for needs in needed), *[None] * len(ctx.options)

    def _backward(self, *arguments: Any) -> list[Tensor]:
        *first, saved, output_grads, needed = arguments
        tensors, options = self._split(first)
        with autograd_inside_op():
            found = self.rule.backward(tensors, options, list(map(_or_none, saved)), output_grads, needed)
        wanted = [
            torch.zeros_like(x, memory_format=torch.contiguous_format) if g is None else g
            for x, g, needs in zip(tensors, found, needed)
            if needs and x is not None
        ]
        return copy_aliases(wanted, [*tensors, *saved, *output_grads])

    def _fake_backward(self, *arguments: Any) -> list[Tensor]:
        *first, _, _, needed = arguments
        tensors, _ = self._split(first)
        return [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x, needs in zip(tensors, needed)
            if needs and x is not None
        ]


def declare_node(spec: OpSpec, backend: str, rule: NodeRule, **more_options: str) -> Node:
    """The node of a backend of an op: its inputs, states and cu_seqlens, its options and more, given with their schema types."""
    tensors = {name: isinstance(role, Role) and role.optional for name, role in spec.inputs.items()}
    tensors |= dict.fromkeys((*spec.states, "cu_seqlens"), True)
    options = {name: option.schema for name, option in spec.options.items()}
    outputs = len(spec.outputs) + len(spec.states)
    return Node(f"{spec.name}_{backend}", tensors, {**options, **more_options}, outputs, rule)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: Node, options: Sequence[Any], *tensors: Tensor | None) -> Any:
        outputs, saved = node.rule.forward(tensors, options, True)
        ctx.save_for_backward(*tensors, *saved)
        ctx.node, ctx.options = node, options
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Any, ...]:
        node, kept = ctx.node, ctx.saved_tensors  # activation checkpointing allows one access only
        tensors, saved = kept[: node.width], kept[node.width :]
        needed = ctx.needs_input_grad[2:]
        return None, None, *node.rule.backward(tensors, ctx.options, saved, output_grads, needed)


def define_op(name: str, signature: str, function: Any, fake: Any, *, any_strides: bool = False) -> Any:
    """An op of torch.library in the namespace fastweights, for any device. any_strides: whether a compiler may pass tensors with
    other strides than those of the program, and so those that it has already."""
    tags = (torch.Tag.pt2_compliant_tag, *[torch.Tag.flexible_layout] * any_strides)
    LIBRARY.define(name + signature, tags=tags)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastweights::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastweights, name).default


def register_gradient(name: str, gradient: Any, keep: Any) -> None:
    """Give the op `name` a gradient: keep(ctx, inputs, output) runs after its forward, gradient(ctx, output_grads) later."""
    torch.library.register_autograd(f"fastweights::{name}", gradient, setup_context=keep, lib=LIBRARY)


# An op returns tensors only: an empty vector stands for None.
def _fill_missing(found: Tensors, inputs: Tensors) -> list[Tensor]:
    like = next(x for x in inputs if x is not None)
    return [like.new_empty(0) if x is None else x for x in found]


def _or_none(x: Tensor) -> Tensor | None:
    return None if x.ndim == 1 and x.shape[0] == 0 else x


def copy_aliases(found: Tensors, inputs: Tensors) -> list[Tensor]:
    """The results as an op may return them: contiguous, none sharing memory with an input or with another."""
    taken = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
    owned = []
    for x in _fill_missing(found, inputs):
        x = x.contiguous()
        x = x.clone() if x.untyped_storage().data_ptr() in taken else x
        taken.add(x.untyped_storage().data_ptr())
        owned.append(x)
    return owned
