"""The ops that read a few tokens and update a state in place. A new state for every token would double the memory traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import check_tensor, shape_of
from ...kernels.availability import takes_kernels
from .call import alone
from .checks import as_tuple, check_inputs, check_options, compute_dtype, full_parameter
from .sequences import check_cu_seqlens
from .spec import BACKENDS, OpSpec

__all__ = ["update_state"]

MAX_TOKENS = 16


def update_state(
    spec: OpSpec, op: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any], state: Any,
    cu_seqlens: Tensor | None, backend: str,
) -> Tensor:  # fmt: skip
    """o of the op; `state`, a tensor or a tuple, is overwritten by the final state."""
    sizes, like = check_inputs(spec, inputs), inputs[0]
    values = check_options(spec, options, sizes)
    sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T)
    if cu_seqlens is not None and sequences.lengths is None:
        longest = -(-sizes.T // sequences.count)  # at least
    else:
        longest = max(sequences.lengths or (sizes.T,))
    if longest > MAX_TOKENS:
        raise ValueError(f"T must be at most {MAX_TOKENS} tokens per sequence, got {longest}; use {spec.name} for more")
    states = as_tuple(state)
    if len(states) != len(spec.states):
        raise ValueError(
            f"state must be ({', '.join(spec.states)}), the {len(spec.states)} tensor(s) of {spec.name}'s final state"
        )
    labels = [f"state {name}" for name in spec.states] if len(states) > 1 else ["state"]
    for label, x, declared in zip(labels, states, spec.states.values()):
        check_state(label, x, (sequences.count, *sizes.shape(declared.dims)), like)
    named = dict(zip(spec.inputs, inputs))
    check_no_gradient(spec.name, {**named, **dict(zip(labels, states))})
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "reference" and takes_kernels(backend, like):
        for name, role in spec.parameters.items():
            named[name] = full_parameter(named[name], role, sizes, like)
        beside = None if cu_seqlens is None else cu_seqlens.to(like.device, non_blocking=True)
        held = dict(zip(spec.states, states))
        return spec.backends["triton"].family.recurrent(named, held, None, values, beside)
    with torch.no_grad():
        o, final = op(
            **named, **options, initial_state=alone(states), output_final_state=True, cu_seqlens=cu_seqlens,
            backend=backend,
        )  # fmt: skip
        for x, new in zip(states, as_tuple(final)):
            x.copy_(new)
    return o


def check_state(name: str, state: Any, shape: tuple[int, ...], like: Tensor) -> None:
    check_tensor(name, state, like)
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {shape_of(state)}")
    dtype = compute_dtype(like)
    if state.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} for {like.dtype} inputs, got {state.dtype}; convert it")


def check_no_gradient(op: str, tensors: Mapping[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient, as the state is overwritten; call under torch.no_grad() or use {op}"
            )
