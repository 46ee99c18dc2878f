"""The preconditioner by itself as a differentiable function, see `node`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.framework.sequences import Sequences
from ...ops.framework.traced import owned
from ..availability import aligned, on_device_of
from ..runtime.launch_plan import plans_for
from .memory import WRITE_KEYS, WriteKeyInputs

__all__ = ["write_keys"]


def write_keys(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, sequences: Sequences, *,
    bound: float, eps: float, final: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The write keys [B, T, HV, K] and the final A, empty unless `final`."""
    edges = None if sequences.cu_seqlens is None else sequences.cu_seqlens.to(k.device, non_blocking=True)
    if torch.compiler.is_compiling():
        tensors = [x if x is None else x.contiguous() for x in (k, g, beta, center, A)]
        keys, end, *_ = _node(*tensors, edges, bound, eps, final)
        return keys, end
    with on_device_of(k):
        return _Function.apply(bound, eps, final, *map(aligned, (k, g, beta, center, A)), edges)


def _forward(tensors: Any, bound: float, eps: float, final: bool) -> list[Tensor]:
    """The keys, the final A (empty unless `final`), and what backward needs."""
    x = WriteKeyInputs(*map(aligned, tensors))
    plans = plans_for(WRITE_KEYS, x, (bound, eps), final=final, keep_saved=True)
    return _tensors(plans.forward.run(x), x.k)


def _tensors(found: Any, like: Tensor) -> list[Tensor]:
    keys, end, *saved = found
    return [
        keys,
        like.new_empty(0, dtype=torch.float32) if end is None else end,
        *(like.new_empty(0) if t is None else t for t in saved),
    ]


def _backward(
    tensors: Any, saved: Any, bound: float, eps: float, dw: Tensor | None, dA_end: Tensor | None, states: bool
) -> list[Tensor | None]:
    x = WriteKeyInputs(*map(aligned, tensors))
    plans = plans_for(WRITE_KEYS, x, (bound, eps), final=False, keep_saved=True)
    keys = plans.recorded[1][0]
    assert keys is not None
    dw = x.k.new_zeros(keys.shape) if dw is None else aligned(dw)
    dA_end = None if dA_end is None or not dA_end.numel() else aligned(dA_end)
    kept = [aligned(t) if spec is not None else None for t, spec in zip(saved, plans.recorded[2])]
    return plans.backward(x, kept, (dw, dA_end), states)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: float, eps: float, final: bool, *tensors: Any) -> Any:
        keys, end, *saved = _forward(tensors, bound, eps, final)
        ctx.save_for_backward(*tensors, *saved)
        ctx.options = bound, eps
        ctx.set_materialize_grads(False)
        return keys, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor | None, dA_end: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        with on_device_of(tensors[0]):
            states = tensors[4] is not None and tensors[4].requires_grad
            bound, eps = ctx.options
            return None, None, None, *_backward(tensors[:6], tensors[6:], bound, eps, dw, dA_end, states)


@torch.library.custom_op("fastweights::write_keys", mutates_args=())
def _node(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, bound: float, eps: float,
    final: bool,
) -> list[Tensor]:  # fmt: skip
    with on_device_of(k):
        return _forward((k, g, beta, center, A, cu_seqlens), bound, eps, final)


@_node.register_fake
def _(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, bound: float, eps: float,
    final: bool,
) -> list[Tensor]:  # fmt: skip
    outputs, saved = WRITE_KEYS.shapes(WriteKeyInputs(k, g, beta, center, A, cu_seqlens), k.device, final)
    return _tensors([None if spec is None else spec.allocate(k.device) for spec in (*outputs, *saved)], k)


@torch.library.custom_op("fastweights::write_keys_backward", mutates_args=())
def _backward_node(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, saved: list[Tensor],
    bound: float, eps: float, dw: Tensor | None, dA_end: Tensor | None, states: bool,
) -> list[Tensor]:  # fmt: skip
    with on_device_of(k):
        found = _backward((k, g, beta, center, A, cu_seqlens), saved, bound, eps, dw, dA_end, states)
    inputs = [x for x in (k, g, beta, center, A) if x is not None]
    return owned([torch.zeros_like(x) if d is None else d for x, d in zip(inputs, found)], inputs)


@_backward_node.register_fake
def _(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, saved: list[Tensor],
    bound: float, eps: float, dw: Tensor | None, dA_end: Tensor | None, states: bool,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x in (k, g, beta, center, A) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.bound, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])


def _traced_backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    states = tensors[4] is not None and tensors[4].requires_grad
    found = _backward_node(*tensors[:6], list(tensors[6:]), ctx.bound, ctx.eps, gradients[0], gradients[1], states)
    return *found, *[None] * (9 - len(found))


_node.register_autograd(_traced_backward, setup_context=_keep)
