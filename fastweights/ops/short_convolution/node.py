"""The kernels as a differentiable function: an autograd function when called eagerly, which costs a quarter of the dispatch
of a custom op, and a custom op, one node of the graph, when traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["convolve"]


def convolve(*inputs: Any) -> tuple[Tensor, Tensor]:
    """y and the final window of (x, weight, bias, window, edges, silu, head, eps, keep), see `triton.forward`."""
    if torch.compiler.is_compiling():
        return _node(*inputs)
    return _Function.apply(*inputs) if torch.is_grad_enabled() else _launch(*inputs)


def _launch(*inputs: Any) -> tuple[Tensor, Tensor]:
    from ...kernels.pointwise.short_convolution import forward

    return forward(*inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, silu, head, eps, ctx.keep = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = silu, head, eps
    ctx.set_materialize_grads(False)


def _received(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
    """The inputs of the backward. (Under activation checkpointing, saved tensors may be asked for only once.)"""
    tensors = ctx.saved_tensors
    dy = tensors[0].new_zeros(tensors[0].shape) if dy is None else dy
    return dy, dfinal if ctx.keep else None, *tensors, *ctx.options


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _launch(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from ...kernels.pointwise.short_convolution import backward

        return *backward(*_received(ctx, *gradients)), None, None, None, None, None


@torch.library.custom_op("fastweights::short_convolution", mutates_args=())
def _node(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    edges: Tensor | None,
    silu: bool,
    head: int | None,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return _launch(x, weight, bias, window, edges, silu, head, eps, keep)


@_node.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, edges: Tensor | None, silu: bool,
    head: int | None, eps: float, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    count = len(x) if edges is None else len(edges) - 1
    return x.new_empty(x.shape), x.new_empty((count, weight.shape[1] - 1, x.shape[2]) if keep else 0)


@torch.library.custom_op("fastweights::short_convolution_backward", mutates_args=())
def _backward_node(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    edges: Tensor | None,
    silu: bool,
    head: int | None,
    eps: float,
) -> list[Tensor]:
    from ...kernels.pointwise.short_convolution import backward

    return [g for g in backward(dy, dfinal, x, weight, bias, window, edges, silu, head, eps) if g is not None]


@_backward_node.register_fake
def _(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None,
    edges: Tensor | None, silu: bool, head: int | None, eps: float,
) -> list[Tensor]:  # fmt: skip
    return [g.new_empty(g.shape) for g in (x, weight, bias, window) if g is not None]


def _traced_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    received = _received(ctx, *gradients)
    found = iter(_backward_node(*received))
    return *(None if x is None else next(found) for x in received[2:6]), None, None, None, None, None


_node.register_autograd(_traced_backward, setup_context=_keep)
