"""The kernels as a differentiable function: an autograd function when called eagerly, a custom op when traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["gated_norm"]


def gated_norm(*inputs: Any) -> Tensor:
    """y of (x, weight, gate, activation, eps, gate_first), see `triton.forward`."""
    if torch.compiler.is_compiling():
        return _node(*inputs)
    return _Function.apply(*inputs) if torch.is_grad_enabled() else _launch(*inputs)


def _launch(*inputs: Any) -> Tensor:
    from ...kernels.pointwise.gated_norm import forward

    return forward(*inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _launch(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from ...kernels.pointwise.gated_norm import backward

        return *backward(dy, *ctx.saved_tensors, *ctx.options), None, None, None


@torch.library.custom_op("fastweights::gated_norm", mutates_args=())
def _node(x: Tensor, weight: Tensor, gate: Tensor | None, activation: str, eps: float, gate_first: bool) -> Tensor:
    return _launch(x, weight, gate, activation, eps, gate_first)


@_node.register_fake
def _(x: Tensor, weight: Tensor, gate: Tensor | None, activation: str, eps: float, gate_first: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fastweights::gated_norm_backward", mutates_args=())
def _backward_node(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, activation: str, eps: float, gate_first: bool
) -> list[Tensor]:
    from ...kernels.pointwise.gated_norm import backward

    return [g for g in backward(dy, x, weight, gate, activation, eps, gate_first) if g is not None]


@_backward_node.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, activation: str, eps: float, gate_first: bool
) -> list[Tensor]:
    return [g.new_empty(g.shape) for g in (x, weight, gate) if g is not None]


def _traced_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight, *dgate = _backward_node(dy, *ctx.saved_tensors, *ctx.options)
    return dx, dweight, dgate[0] if dgate else None, None, None, None


_node.register_autograd(_traced_backward, setup_context=_keep)
