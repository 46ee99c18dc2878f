"""Ops inside torch.compile: one opaque node, forward and backward, whatever the length.

Traced through, a walk over T/64 chunks would become a graph that grows with T, and packed rows, whose lengths are numbers in
a tensor, could not be traced at all. As a node the op runs as it does eagerly. Its backward runs the forward once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# compute(implementation's name, tensors by name, plain keywords) -> outputs and final states, registered by `run`
Compute = Callable[[str, Mapping[str, Tensor], Mapping[str, Any]], Sequence[Tensor]]
_compute: list[Compute] = []


def computes(function: Compute) -> None:
    """Register the function that the node calls."""
    _compute[:] = [function]


def _describe(implementation: str, like: tuple[str, ...], names: tuple[str, ...], plain: tuple) -> str:
    return json.dumps(
        {
            "implementation": implementation,
            "like": [names.index(name) for name in like],
            "names": names,
            "plain": dict(plain),
        }
    )


# What torch.compiler.assume_constant_result does, without its import of all of torch._dynamo: seconds at every start.
_describe._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run_as_node(
    implementation: str,
    *,
    like: Sequence[str],
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> list[Tensor]:
    """The results of `compute`, as one node of the graph that is being traced.

    like: for each result the tensor whose shape it has; plain: what else the computation needs, JSON's kinds of values
    (tuples for lists).
    """
    description = _describe(implementation, tuple(like), tuple(tensors), tuple(plain.items()))
    return _node(description, list(tensors.values()))


def _apply(description: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    call = json.loads(description)
    return list(_compute[0](call["implementation"], dict(zip(call["names"], tensors)), call["plain"]))


def owned(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results as a node may return them: contiguous, none sharing memory with an input or with another."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    owned = []
    for x in results:
        x = x.contiguous()
        x = x.clone() if x.untyped_storage().data_ptr() in taken else x
        taken.add(x.untyped_storage().data_ptr())
        owned.append(x)
    return owned


def _like_inputs(description: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    call = json.loads(description)
    return [torch.empty_like(tensors[index]) for index in call["like"]]


@torch.library.custom_op("fastweights::run", mutates_args=())
def _node(description: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return owned(_apply(description, tensors), tensors)


@_node.register_fake
def _(description: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _like_inputs(description, tensors)]


@torch.library.custom_op("fastweights::run_backward", mutates_args=())
def _backward_node(description: str, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    with autograd_on():
        results = _apply(description, leaves)
        reached, given = zip(*((x, g) for x, g in zip(results, gradients) if x.requires_grad))
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(reached, wanted, given, materialize_grads=True))
    return owned([next(found) if x.requires_grad else torch.zeros_like(x) for x in leaves], [*leaves, *gradients])


@contextmanager
def autograd_on() -> Iterator[None]:
    """Autograd inside a node, where the dispatcher has it switched off below what enable_grad reaches. (Another thread has
    it on, but cannot run a backward on CUDA while the node's own thread is the one that serves it.)"""
    keys = torch._C.DispatchKey
    with (
        torch.enable_grad(),
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
    ):
        yield


@_backward_node.register_fake
def _(description: str, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _keep(ctx: Any, inputs: tuple[str, Sequence[Tensor]], output: Sequence[Tensor]) -> None:
    ctx.description, tensors = inputs
    ctx.save_for_backward(*tensors)
    ctx.outputs = [(x.shape, x.dtype, x.device) for x in output]


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    full = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g.contiguous()
        for g, (shape, dtype, device) in zip(gradients, ctx.outputs)
    ]
    tensors = list(ctx.saved_tensors)
    found = _backward_node(ctx.description, tensors, full)
    return None, [g if x.is_floating_point() else None for g, x in zip(found, tensors)]


_node.register_autograd(_backward, setup_context=_keep)
