"""Collectives as linear maps: the gradient of each is another one, or itself the other way round.

As ops of torch.library they stand in traced graphs, where a process group goes by its name. They run on the current stream, so a
CUDA graph can record them. Nothing is summed in the order of arrival: repeated calls return the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..framework.node import define_op, register_gradient
from .group import ContextParallel, group_of
from .planned import PlannedGroup

__all__ = ["LinearMap", "all_gather", "all_to_all", "reduce_scatter", "send_parts", "transpose"]

Tensors = Sequence[Tensor]
_gather_into: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name since 2.13


class LinearMap:
    """A linear function of a list of tensors. `transpose` gives it a gradient.

    Args:
        name: of the op of torch.library.
        options: their names with the types of a schema.
        run: takes the tensors and the options. It returns new tensors, none of them an input.
        fake: likewise, uninitialised tensors.
    """

    adjoint: LinearMap
    turn: Callable[..., Sequence[Any]]

    def __init__(self, name: str, options: str, run: Callable[..., Tensors], fake: Callable[..., Tensors]) -> None:
        self.name, self.run, self.fake = name, run, fake
        self.op = define_op(name, f"(Tensor[] tensors, {options}) -> Tensor[]", run, fake)
        register_gradient(name, self._gradient, self._keep)

    def __call__(self, tensors: Tensors, *options: Any) -> Tensors:
        if torch.compiler.is_compiling():
            return self.op(list(tensors), *options)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _Eager.apply(self, options, *tensors)
        return self.compute(tensors, *options)

    def compute(self, tensors: Tensors, *options: Any) -> Tensors:
        if not tensors[0].is_meta:
            return self.run(tensors, *options)
        group = group_of(options[-1])
        if isinstance(group, PlannedGroup):
            share = group.size() - 1 if self is _ALL_GATHER else 1 - 1 / group.size()
            group.note(self.name, share * sum(x.nbytes for x in tensors))
        return self.fake(tensors, *options)

    def _keep(self, ctx: Any, inputs: Sequence[Any], output: Tensors) -> None:
        ctx.options, ctx.like = inputs[1:], [(x.shape, x.dtype, x.device) for x in output]

    def _gradient(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        whole = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(grads, ctx.like)
        ]
        return self.adjoint.op(whole, *self.turn(*ctx.options)), *[None] * len(ctx.options)


def transpose(
    linear: LinearMap, adjoint: LinearMap, turn: Callable[..., Sequence[Any]] = lambda *options: options
) -> None:
    """Make two maps the gradients of each other. turn: from the options of one to those of the other."""
    for one, other in ((linear, adjoint), (adjoint, linear)):
        one.adjoint, one.turn = other, turn


class _Eager(torch.autograd.Function):
    """The map outside graphs, at a fraction of what the dispatch of an op costs."""

    @staticmethod
    def forward(ctx: Any, linear: LinearMap, options: Sequence[Any], *tensors: Tensor) -> Any:
        ctx.linear, ctx.options = linear, options
        return tuple(linear.compute(tensors, *options))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.linear.adjoint(grads, *ctx.linear.turn(*ctx.options))


def send_parts(x: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None, name: str) -> Tensor:
    """Send part r of x, cut along its first dimension, to rank r, and join what arrives in the order of ranks. None for parts of
    one size. No autograd."""
    count = len(x) if received is None else sum(received)
    out = x.new_empty((count, *x.shape[1:]))
    of_out, of_x = (None if sizes is None else list(sizes) for sizes in (received, sent))
    dist.all_to_all_single(out, x.contiguous(), of_out, of_x, group=group_of(name))
    return out


def _gather(tensors: Tensors, size: int, name: str) -> Tensors:
    outputs = [x.new_empty((size, *x.shape)) for x in tensors]
    for x, out in zip(tensors, outputs):
        _gather_into(out.view(-1), x.reshape(-1), group=group_of(name))
    return outputs


def _scatter_sums(tensors: Tensors, size: int, name: str) -> Tensors:
    """The parts are added here in the order of ranks: how a backend's own reduce-scatter adds them is its own affair."""
    return [send_parts(x, None, None, name).sum(0) for x in tensors]


_ALL_TO_ALL = LinearMap(
    "all_to_all",
    "SymInt[] received, SymInt[] sent, str group",
    run=lambda tensors, received, sent, name: [send_parts(x, received, sent, name) for x in tensors],
    fake=lambda tensors, received, sent, name: [x.new_empty((sum(received), *x.shape[1:])) for x in tensors],
)
_ALL_GATHER = LinearMap(
    "all_gather",
    "int size, str group",
    run=_gather,
    fake=lambda tensors, size, name: [x.new_empty((size, *x.shape)) for x in tensors],
)
_REDUCE_SCATTER = LinearMap(
    "reduce_scatter",
    "int size, str group",
    run=_scatter_sums,
    fake=lambda tensors, size, name: [x.new_empty(x.shape[1:]) for x in tensors],
)
transpose(_ALL_TO_ALL, _ALL_TO_ALL, turn=lambda received, sent, name: (sent, received, name))
transpose(_ALL_GATHER, _REDUCE_SCATTER)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], cp: ContextParallel) -> Tensor:
    """Part r of x goes to rank r; the parts that arrive, in the order of ranks.

    Args:
        x: [sum of sent, ...].
        sent, received: sizes of the parts along the first dimension, one per rank.

    Returns:
        [sum of received, ...].
    """
    return _ALL_TO_ALL([x], received, sent, cp.name)[0]


def all_gather(x: Tensor, cp: ContextParallel) -> Tensor:
    """[size, *x.shape]: the x of every rank. Its gradient is `reduce_scatter`."""
    return _ALL_GATHER([x], cp.size, cp.name)[0]


def reduce_scatter(x: Tensor, cp: ContextParallel) -> Tensor:
    """x.shape[1:]: the sum over the ranks of x[r], on rank r. x: [size, ...]. Its gradient is `all_gather`."""
    return _REDUCE_SCATTER([x], cp.size, cp.name)[0]
