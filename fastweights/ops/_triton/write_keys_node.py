"""The preconditioner by itself as a differentiable function, see `node`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._shared.backends import aligned, on_device_of
from .._shared.sequences import Sequences, check_cu_seqlens
from .._shared.traced import owned
from .plan import Inputs, Plan
from .preconditioner import Asked, ask_preconditioner, preconditioner_gradients, start_preconditioner, write_all_keys

__all__ = ["write_keys"]


def write_keys(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, sequences: Sequences, *,
    bound: float, eps: float, final: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The write keys [B, T, HV, K] and the final A, empty unless `final`."""
    tensors = [x if x is None else x.contiguous() for x in (k, g, beta, center, A)]
    if torch.compiler.is_compiling():
        keys, end, _ = _node(*tensors, sequences.cu_seqlens, bound, eps, final)
        return keys, end
    with on_device_of(k):
        return _Function.apply(sequences, bound, eps, final, *tensors)


def _plan(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, sequences: Sequences
) -> tuple[Inputs, Plan]:
    """As a memory with these heads and no values."""
    v = k.new_empty((*k.shape[:2], max(g.shape[2], beta.shape[2]), 1))
    x = Inputs(q=k, k=k, v=v, precond_g=g, precond_beta=beta, center=center, A=A)
    return x, Plan(x, sequences)


def _forward(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, sequences: Sequences, bound: float, eps: float,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, plan = _plan(k, g, beta, center, A, sequences)
    x = x.aligned()
    *_, gram, keys = plan.saved()
    end = plan.new(sequences.count if final else 0, plan.HV, plan.K, dtype=torch.float32)
    start_preconditioner(x, plan, gram, end if final else None)
    write_all_keys(x, plan, gram, bound, eps, keys)
    return keys, end, gram


def _backward(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, gram: Tensor, sequences: Sequences,
    bound: float, eps: float, dw: Tensor | None, dA_end: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    x, plan = _plan(k, g, beta, center, A, sequences)
    x = x.aligned()
    dw = k.new_zeros((*plan.rows, plan.HV, plan.K)) if dw is None else dw.clone(memory_format=torch.contiguous_format)
    dk = torch.zeros_like(dw)
    gram = aligned(gram)
    asked = Asked.of(plan, plan.where.M, dw)
    ask_preconditioner(x, plan, gram, dw, dk, asked, bound, eps)
    dA_end = None if dA_end is None or not dA_end.numel() else aligned(dA_end)
    states = A is not None and A.requires_grad
    dg, dbeta, dcenter, dA = preconditioner_gradients(x, plan, gram, asked, dk, dA_end, states)
    return [plan.shared(dk, k), plan.shared(dg, g), plan.shared(dbeta, beta), dcenter, dA]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequences: Sequences, bound: float, eps: float, final: bool, *tensors: Any) -> Any:
        k, g, beta, center, A = tensors
        keys, end, gram = _forward(k, g, beta, center, A, sequences, bound, eps, final)
        ctx.save_for_backward(*tensors, gram)
        ctx.options = sequences, bound, eps
        ctx.set_materialize_grads(False)
        return keys, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        with on_device_of(tensors[0]):
            return None, None, None, None, *_backward(*tensors, *ctx.options, *gradients)


@torch.library.custom_op("fastweights::write_keys", mutates_args=())
def _node(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, bound: float, eps: float,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with on_device_of(k):
        return _forward(k, g, beta, center, A, check_cu_seqlens(cu_seqlens, *k.shape[:2]), bound, eps, final)


@_node.register_fake
def _(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, bound: float, eps: float,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sequences = Sequences(k.shape[0], k.shape[1], cu_seqlens=cu_seqlens)
    _, plan = _plan(k, g, beta, center, A, sequences)
    end = plan.new(sequences.count if final else 0, plan.HV, plan.K, dtype=torch.float32)
    *_, gram, keys = plan.saved()
    return keys, end, gram


@torch.library.custom_op("fastweights::write_keys_backward", mutates_args=())
def _backward_node(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, gram: Tensor,
    bound: float, eps: float, dw: Tensor | None, dA_end: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    sequences = check_cu_seqlens(cu_seqlens, *k.shape[:2])
    with on_device_of(k):
        found = _backward(k, g, beta, center, A, gram, sequences, bound, eps, dw, dA_end)
    inputs = [x for x in (k, g, beta, center, A) if x is not None]
    return owned([torch.zeros_like(x) if d is None else d for x, d in zip(inputs, found)], inputs)


@_backward_node.register_fake
def _(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, gram: Tensor,
    bound: float, eps: float, dw: Tensor | None, dA_end: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x in (k, g, beta, center, A) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.bound, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors, output[2])


def _traced_backward(ctx: Any, dw: Tensor | None, dA_end: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    found = _backward_node(*ctx.saved_tensors, ctx.bound, ctx.eps, dw, dA_end)
    return *found, *[None] * (9 - len(found))


_node.register_autograd(_traced_backward, setup_context=_keep)
