"""The kernels as a differentiable function: an autograd function when called eagerly, which costs a fraction of the dispatch of
a custom op (and none of torch._dynamo's import), and a custom op, one node of the graph, when traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.framework.sequences import Sequences, check_cu_seqlens
from ...ops.framework.traced import owned
from ..availability import aligned, on_device_of
from ..recurrent.decode import Preconditioner, decode
from ..runtime.call import Call, Rule, call_of
from .backward import backward
from .forward import forward
from .sizes import Inputs, Plan

__all__ = ["remember"]

MEMORY = Rule(forward, backward)
WIDTH = len(Inputs._fields)
FEW = 16  # tokens that are served one after the other where no gradient is asked for


def remember(
    x: Inputs, sequences: Sequences, *, scale: float, bound: float = 1.5, eps: float = 1e-6, final: bool
) -> tuple[Tensor, tuple[Any, ...]]:
    """o and the final states, S and with a preconditioner A; without meaning unless `final`."""
    if torch.compiler.is_compiling():
        whole = (t if t is None else t.contiguous() for t in x)
        o, S, A, *_ = _node(*whole, sequences.cu_seqlens, scale, bound, eps, final)
    else:
        x = x.aligned()
        asked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
        with on_device_of(x.q):
            if not asked and _longest(sequences) <= FEW:
                return _step(x, sequences, scale, bound, eps)
            call = call_of(MEMORY, x, sequences, (scale, bound, eps), final=final, learns=asked)
            o, S, A = _Function.apply(call, *x) if asked else call.forward.play(x)
    return o, (S,) if x.precond_g is None else (S, A)


def _longest(sequences: Sequences) -> int:
    return sequences.time if sequences.lengths is None else max(sequences.lengths, default=0)


def _step(x: Inputs, sequences: Sequences, scale: float, bound: float, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A few tokens by the recurrence, without gradients."""

    def place(given: Tensor | None, *shape: int) -> tuple[Tensor, Tensor | None]:
        """The state before, and where the new one goes: zeros are updated in place."""
        if given is None:
            return torch.zeros(sequences.count, *shape, device=x.q.device), None
        return given, torch.empty_like(given)

    heads, value = x.v.shape[2:]
    S, new_S = place(x.S, heads, x.q.shape[3], value)
    preconditioner, states = None, [(S, new_S)]
    if x.precond_g is not None and x.precond_beta is not None and x.center is not None:
        A, new_A = place(x.A, heads, x.q.shape[3])
        states.append((A, new_A))
        preconditioner = Preconditioner(A, new_A, x.precond_g, x.precond_beta, x.center, bound, eps)
    edges = sequences.cu_seqlens
    o = decode(
        x.q, x.k, x.v, beta=x.beta, g=x.g, write_key=x.write_key, state=S, new_state=new_S, preconditioner=preconditioner,
        scale=scale, cu_seqlens=None if edges is None else edges.to(x.q.device),
    )  # fmt: skip
    return o, tuple(old if new is None else new for old, new in states)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Any) -> Any:
        o, S, A, *saved = call.forward.play(inputs)
        ctx.save_for_backward(*inputs, *saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, S, A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # under activation checkpointing they may be asked for only once
        x = Inputs(*tensors[:WIDTH])
        with on_device_of(x.q):
            return None, *_gradients(ctx.call, x, tensors[WIDTH:], gradients, _states(x))


def _states(x: Inputs) -> bool:
    """Whether their gradients are asked for."""
    return any(s is not None and s.requires_grad for s in (x.S, x.A))


def _gradients(
    call: Call, x: Inputs, saved: Sequence[Tensor | None], asked: Sequence[Tensor | None], states: bool
) -> Inputs:  # fmt: skip
    """asked: the gradients of o and the final states."""
    do, *of_states = asked
    do = torch.zeros_like(x.v) if do is None else aligned(do)
    asked = do, *[None if d is None or not d.numel() else aligned(d) for d in of_states]
    return call.backward(x.aligned(), [aligned(t) for t in saved], asked, states)


@torch.library.custom_op("fastweights::memory", mutates_args=())
def _node(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, write_key: Tensor | None, S: Tensor | None,
    precond_g: Tensor | None, precond_beta: Tensor | None, center: Tensor | None, A: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bound: float, eps: float, final: bool,
) -> list[Tensor]:  # fmt: skip
    x = Inputs(q, k, v, beta, g, write_key, S, precond_g, precond_beta, center, A)
    sequences = check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1])
    with on_device_of(q):
        x = x.aligned()
        call = call_of(MEMORY, x, sequences, (scale, bound, eps), final=final, learns=True)
        return _tensors(call.forward.play(x), q)


def _tensors(found: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """As a node gives them: nothing is an empty tensor."""
    return [like.new_empty(0) if t is None else t for t in found]


@_node.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, write_key: Tensor | None, S: Tensor | None,
    precond_g: Tensor | None, precond_beta: Tensor | None, center: Tensor | None, A: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bound: float, eps: float, final: bool,
) -> list[Tensor]:  # fmt: skip
    x = Inputs(q, k, v, beta, g, write_key, S, precond_g, precond_beta, center, A)
    sequences = Sequences(q.shape[0], q.shape[1], cu_seqlens=cu_seqlens)
    plan = Plan(x, sequences, q.device)
    S_end, A_end = plan.ends(final)
    wanted = (None if buffer is None else buffer.tensor(q.device) for buffer in (S_end, A_end, *plan.saved()))
    return _tensors([torch.empty_like(v), *wanted], q)


@torch.library.custom_op("fastweights::memory_backward", mutates_args=())
def _backward_node(
    inputs: list[Tensor], present: list[int], saved: list[Tensor], do: Tensor | None, dS: Tensor | None, dA: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bound: float, eps: float, states: bool,
) -> list[Tensor]:  # fmt: skip
    given = iter(inputs)
    x = Inputs(*(next(given) if here else None for here in present))
    sequences = check_cu_seqlens(cu_seqlens, x.q.shape[0], x.q.shape[1])
    with on_device_of(x.q):
        call = call_of(MEMORY, x, sequences, (scale, bound, eps), final=False, learns=True)
        kept = [t if buffer is not None else None for t, buffer in zip(saved, call.saved)]
        found = _gradients(call, x, kept, (do, dS, dA), states)
    wanted = [torch.zeros_like(t) if d is None else d for t, d in zip(x, found) if t is not None]
    return owned(wanted, inputs)


@_backward_node.register_fake
def _(
    inputs: list[Tensor], present: list[int], saved: list[Tensor], do: Tensor | None, dS: Tensor | None, dA: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bound: float, eps: float, states: bool,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(t) for t in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.scale, ctx.bound, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors, *output[3:])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    x, cu_seqlens, saved = Inputs(*tensors[:WIDTH]), tensors[WIDTH], tensors[WIDTH + 1 :]
    do, dS, dA, *_ = gradients
    present = [t is not None for t in x]
    found = iter(
        _backward_node(
            [t for t in x if t is not None], [int(p) for p in present], saved, do, dS, dA, cu_seqlens, ctx.scale, ctx.bound,
            ctx.eps, _states(x),
        )
    )  # fmt: skip
    return *(next(found) if here else None for here in present), None, None, None, None, None


_node.register_autograd(_backward, setup_context=_keep)
