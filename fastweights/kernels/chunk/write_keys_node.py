"""The preconditioner by itself as a differentiable function, see `node`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.framework.sequences import Sequences, check_cu_seqlens
from ...ops.framework.traced import owned
from ..availability import aligned, on_device_of
from ..runtime.call import Rule, as_input, call_of
from ..runtime.workspace import Buffer
from .preconditioner import Asked, ask_preconditioner, preconditioner_gradients, start_preconditioner, write_all_keys
from .reduce import sum_up
from .sizes import Inputs, Plan

__all__ = ["write_keys"]


def write_keys(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, sequences: Sequences, *,
    bound: float, eps: float, final: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The write keys [B, T, HV, K] and the final A, empty unless `final`."""
    if torch.compiler.is_compiling():
        tensors = [x if x is None else x.contiguous() for x in (k, g, beta, center, A)]
        keys, end, _ = _node(*tensors, sequences.cu_seqlens, bound, eps, final)
        return keys, end
    with on_device_of(k):
        return _Function.apply(sequences, bound, eps, final, *map(aligned, (k, g, beta, center, A)))


def _inputs(*tensors: Any) -> Inputs:
    """k, g, beta, center, A as of a memory with these heads, whose values nothing reads."""
    k, g, beta, center, A = tensors
    v = Buffer((*k.shape[:2], max(g.shape[2], beta.shape[2]), 1), k.dtype)
    return Inputs(q=k, k=k, v=v, precond_g=g, precond_beta=beta, center=center, A=A)


def _results(plan: Plan, final: bool) -> tuple[Buffer, Buffer, Buffer]:
    """The keys, the final A (empty unless `final`), and A at the chunks' starts."""
    *_, gram, keys = plan.saved()
    _, end = plan.ends(final)
    return keys, plan.new(0, dtype=torch.float32) if end is None else end, gram


def forward(
    x: Inputs, plan: Plan, bound: float, eps: float, final: bool
) -> tuple[tuple[Buffer, Buffer], tuple[Buffer]]:  # fmt: skip
    keys, end, gram = _results(plan, final)
    start_preconditioner(x, plan, gram, end if final else None)
    write_all_keys(x, plan, gram, bound, eps, keys)
    return (keys, end), (gram,)


def backward(
    x: Inputs, plan: Plan, bound: float, eps: float, saved: tuple[Buffer], dw: Buffer, dk: Buffer, dA_end: Buffer | None,
    states: bool,
) -> Inputs:  # fmt: skip
    """dw is spent, and what reaches the keys added to dk."""
    (gram,) = saved
    asked = Asked.of(plan, dw)
    ask_preconditioner(x, plan, gram, dw, dk, asked, bound, eps)
    dg, dbeta, dA = preconditioner_gradients(x, plan, gram, asked, dk, dA_end, states)
    *_, dcenter = sum_up(x, plan, None, asked.to_center)
    return Inputs(None, None, None, precond_g=dg, precond_beta=dbeta, center=dcenter, A=dA)


KEYS = Rule(forward, backward)


def _forward(x: Inputs, sequences: Sequences, bound: float, eps: float, final: bool) -> tuple[Any, Any, Any]:
    """The keys, the final A (empty unless `final`), and what backward keeps."""
    call = call_of(KEYS, x, sequences, (bound, eps), final=final, learns=True)
    keys, end, gram = call.forward.play(x._replace(v=None))
    return keys, end, gram


def _backward(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, gram: Tensor, sequences: Sequences,
    bound: float, eps: float, dw: Tensor | None, dA_end: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    x = _inputs(*map(aligned, (k, g, beta, center, A)))
    call = call_of(KEYS, x, sequences, (bound, eps), final=False, learns=True)
    shape = *k.shape[:2], x.v.shape[2], k.shape[3]
    dw = k.new_zeros(shape) if dw is None else dw.clone(memory_format=torch.contiguous_format)
    dk = torch.zeros_like(dw)
    dA_end = None if dA_end is None or not dA_end.numel() else aligned(dA_end)
    states = A is not None and A.requires_grad
    found = call.backward(x._replace(v=None), [aligned(gram)], (dw, dk, dA_end), states)
    return [as_input(k, dk), found.precond_g, found.precond_beta, found.center, found.A]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequences: Sequences, bound: float, eps: float, final: bool, *tensors: Any) -> Any:
        keys, end, gram = _forward(_inputs(*tensors), sequences, bound, eps, final)
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
    sequences = check_cu_seqlens(cu_seqlens, *k.shape[:2])
    with on_device_of(k):
        return _forward(_inputs(*map(aligned, (k, g, beta, center, A))), sequences, bound, eps, final)


@_node.register_fake
def _(
    k: Tensor, g: Tensor, beta: Tensor, center: Tensor, A: Tensor | None, cu_seqlens: Tensor | None, bound: float, eps: float,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sequences = Sequences(k.shape[0], k.shape[1], cu_seqlens=cu_seqlens)
    plan = Plan(_inputs(k, g, beta, center, A), sequences, k.device)
    keys, end, gram = (buffer.tensor(k.device) for buffer in _results(plan, final))
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
