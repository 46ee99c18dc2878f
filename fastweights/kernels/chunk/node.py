"""The kernels as a differentiable function: an autograd function when called eagerly, which costs a fraction of the dispatch of
a custom op (and none of torch._dynamo's import), and a custom op, one node of the graph, when traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.framework.sequences import Sequences
from ...ops.framework.traced import owned
from ..availability import aligned, on_device_of
from ..recurrent.decode import Preconditioner, decode
from ..runtime.launch_plan import CallPlans, plans_for
from .memory import MEMORY
from .sizes import KernelInputs

__all__ = ["remember"]

WIDTH = len(KernelInputs._fields)
MAX_RECURRENT_TOKENS = 16  # per sequence, where no gradient is needed


def remember(
    x: KernelInputs, sequences: Sequences, *, scale: float, bound: float = 1.5, eps: float = 1e-6, final: bool
) -> tuple[Tensor, tuple[Any, ...]]:
    """o and the final states, S and with a preconditioner A; without meaning unless `final`."""
    if sequences.cu_seqlens is not None:
        x = x._replace(cu_seqlens=sequences.cu_seqlens.to(x.q.device, non_blocking=True))
    if torch.compiler.is_compiling():
        whole = (t if t is None else t.contiguous() for t in x)
        o, S, A, *_ = _node(*whole, scale, bound, eps, final)
    else:
        x = x.aligned()
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
        with on_device_of(x.q):
            if not needs_grad and is_short(x):
                return _step(x, scale, bound, eps)
            plans = plans_for(MEMORY, x, (scale, bound, eps), final=final, keep_saved=needs_grad)
            o, S, A = _Function.apply(plans, *x) if needs_grad else plans.forward.run(x)
    return o, (S,) if x.precond_g is None else (S, A)


def is_short(x: KernelInputs) -> bool:
    """Whether the recurrent kernel reads the tokens one after another: a choice by sizes, never by lengths."""
    time = x.q.shape[1]
    return time <= MAX_RECURRENT_TOKENS or (x.cu_seqlens is not None and time <= 2 * (len(x.cu_seqlens) - 1))


def _step(x: KernelInputs, scale: float, bound: float, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A few tokens by the recurrence, without gradients."""

    def place(given: Tensor | None, *shape: int) -> tuple[Tensor, Tensor | None]:
        """The state before, and where the new one goes: zeros are updated in place."""
        if given is None:
            return torch.zeros(count, *shape, device=x.q.device), None
        return given, torch.empty_like(given)

    heads, value = x.v.shape[2:]
    count = len(x.q) if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    S, new_S = place(x.S, heads, x.q.shape[3], value)
    preconditioner, states = None, [(S, new_S)]
    if x.precond_g is not None and x.precond_beta is not None and x.center is not None:
        A, new_A = place(x.A, heads, x.q.shape[3])
        states.append((A, new_A))
        preconditioner = Preconditioner(A, new_A, x.precond_g, x.precond_beta, x.center, bound, eps)
    o = decode(
        x.q, x.k, x.v, beta=x.beta, g=x.g, write_key=x.write_key, state=S, new_state=new_S, preconditioner=preconditioner,
        scale=scale, cu_seqlens=x.cu_seqlens,
    )  # fmt: skip
    return o, tuple(old if new is None else new for old, new in states)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plans: CallPlans, *inputs: Any) -> Any:
        o, S, A, *saved = plans.forward.run(inputs)
        ctx.save_for_backward(*inputs, *saved)
        ctx.plans = plans
        ctx.set_materialize_grads(False)
        return o, S, A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # under activation checkpointing they may be asked for only once
        x = KernelInputs(*tensors[:WIDTH])
        with on_device_of(x.q):
            return None, *_gradients(ctx.plans, x, tensors[WIDTH:], gradients, _states(x))


def _states(x: KernelInputs) -> bool:
    """Whether their gradients are needed."""
    return any(s is not None and s.requires_grad for s in (x.S, x.A))


def _gradients(
    plans: CallPlans, x: KernelInputs, saved: Sequence[Tensor | None], output_grads: Sequence[Tensor | None], states: bool
) -> list[Tensor | None]:  # fmt: skip
    """output_grads: the gradients of o and the final states."""
    do, *of_states = output_grads
    do = torch.zeros_like(x.v) if do is None else aligned(do)
    output_grads = do, *[None if d is None or not d.numel() else aligned(d) for d in of_states]
    return plans.backward(x.aligned(), [aligned(t) for t in saved], output_grads, states)


@torch.library.custom_op("fastweights::memory", mutates_args=())
def _node(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, write_key: Tensor | None, S: Tensor | None,
    precond_g: Tensor | None, precond_beta: Tensor | None, center: Tensor | None, A: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bound: float, eps: float, final: bool,
) -> list[Tensor]:  # fmt: skip
    x = KernelInputs(q, k, v, beta, g, write_key, S, precond_g, precond_beta, center, A, cu_seqlens)
    with on_device_of(q):
        x = x.aligned()
        plans = plans_for(MEMORY, x, (scale, bound, eps), final=final, keep_saved=True)
        return _tensors(plans.forward.run(x), q)


def _tensors(found: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """As a node gives them: nothing is an empty tensor."""
    return [like.new_empty(0) if t is None else t for t in found]


@_node.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, write_key: Tensor | None, S: Tensor | None,
    precond_g: Tensor | None, precond_beta: Tensor | None, center: Tensor | None, A: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bound: float, eps: float, final: bool,
) -> list[Tensor]:  # fmt: skip
    x = KernelInputs(q, k, v, beta, g, write_key, S, precond_g, precond_beta, center, A, cu_seqlens)
    outputs, saved = MEMORY.shapes(x, q.device, final)
    return _tensors([None if spec is None else spec.allocate(q.device) for spec in (*outputs, *saved)], q)


@torch.library.custom_op("fastweights::memory_backward", mutates_args=())
def _backward_node(
    inputs: list[Tensor], present: list[int], saved: list[Tensor], do: Tensor | None, dS: Tensor | None, dA: Tensor | None,
    scale: float, bound: float, eps: float, states: bool,
) -> list[Tensor]:  # fmt: skip
    given = iter(inputs)
    x = KernelInputs(*(next(given) if here else None for here in present))
    with on_device_of(x.q):
        plans = plans_for(MEMORY, x, (scale, bound, eps), final=False, keep_saved=True)
        kept = [t if spec is not None else None for t, spec in zip(saved, plans.recorded[2])]
        found = _gradients(plans, x, kept, (do, dS, dA), states)
    wanted = [torch.zeros_like(t) if d is None else d for t, d in zip(x, found) if t is not None]
    return owned(wanted, inputs)


@_backward_node.register_fake
def _(
    inputs: list[Tensor], present: list[int], saved: list[Tensor], do: Tensor | None, dS: Tensor | None, dA: Tensor | None,
    scale: float, bound: float, eps: float, states: bool,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(t) for t in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.scale, ctx.bound, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors, *output[3:])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    x, saved = KernelInputs(*tensors[:WIDTH]), tensors[WIDTH:]
    do, dS, dA, *_ = gradients
    present = [t is not None for t in x]
    found = iter(
        _backward_node(
            [t for t in x if t is not None], [int(p) for p in present], saved, do, dS, dA, ctx.scale, ctx.bound,
            ctx.eps, _states(x),
        )
    )  # fmt: skip
    grads = [next(found) if here else None for here in present]
    grads[-1] = None  # of cu_seqlens
    return *grads, None, None, None, None


_node.register_autograd(_backward, setup_context=_keep)
