"""The ops that read a few tokens and update a state in place. A new state for every token would double the memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from .call import alone
from .checks import as_tuple, check_inputs, check_options
from .decode_checks import check_length, check_no_gradient, check_state, check_state_indices, pool_size
from .sequences import Sequences, check_cu_seqlens
from .spec import BACKENDS, OpSpec, spec_of

__all__ = ["from_rows", "into_rows", "update_pool", "update_state"]

_signature = cache(inspect.signature)


def update_pool(
    op: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any], states: Mapping[str, Tensor], rows: Tensor,
    call: Mapping[str, Any],
) -> Any:  # fmt: skip
    """The outputs of a call of an op, whose initial states are rows of pools that the final states overwrite. call: cu_seqlens
    and backend."""
    spec, signature = spec_of(op), _signature(op)
    given = signature.bind_partial(*inputs, **options)
    given.apply_defaults()
    return update_state(
        spec, op, [given.arguments[name] for name in spec.inputs], {name: given.arguments[name] for name in spec.options},
        state=alone(tuple(states.values())), state_indices=rows, cu_seqlens=call["cu_seqlens"], backend=call["backend"],
    )  # fmt: skip


def update_state(
    spec: OpSpec, op: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any], *, state: Any,
    state_indices: Tensor | None, cu_seqlens: Tensor | None, backend: str,
) -> Any:  # fmt: skip
    """The outputs of the op; `state`, a tensor or a tuple, is overwritten by the final state."""
    sizes, like = check_inputs(spec, inputs), inputs[0]
    values = check_options(spec, options, sizes)
    sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T, like=like)
    check_length(spec.name, sequences)
    states = as_tuple(state)
    if len(states) != len(spec.states):
        raise ValueError(
            f"state must be ({', '.join(spec.states)}), the {len(spec.states)} tensor(s) of {spec.name}'s final state"
        )
    labels = [f"state {name}" for name in spec.states] if len(states) > 1 else ["state"]
    count = sequences.count if state_indices is None else pool_size(labels[0], states[0])
    for label, x, declared in zip(labels, states, spec.states.values()):
        check_state(label, x, (count, *sizes.shape(declared.dims)), like, integer=declared.counts)
    if state_indices is not None:
        check_state_indices(state_indices, sequences.count, count, like)
    named = dict(zip(spec.inputs, inputs))
    check_no_gradient(spec.name, {**named, **dict(zip(labels, states))})
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    kernel = spec.recurrent
    if (
        backend != "reference"
        and kernel is not None
        and kernel.takes(named, values, sizes.K)
        and takes_kernels(backend, like)
    ):
        for name in spec.parameters:
            named[name] = kernel.parameter(name, named[name], sizes, like)
        return kernel.update(named, dict(zip(spec.states, states)), values, cu_seqlens, state_indices)
    with torch.no_grad():
        sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T, read=True)
        before = states if state_indices is None else tuple(from_rows(x, state_indices) for x in states)
        *outputs, final = op(
            **named, **options, initial_state=alone(before), output_final_state=True, cu_seqlens=cu_seqlens,
            backend=backend,
        )  # fmt: skip
        finals = as_tuple(final)
        if not all(sequences.lengths or (sizes.T,)):  # a sequence without tokens keeps its state, to the last bit
            longer = torch.tensor(sequences.lengths or [sizes.T] * sizes.B, device=like.device) > 0
            finals = tuple(torch.where(like_rows(longer, x), x, old) for x, old in zip(finals, before))
        for x, new in zip(states, finals):
            x.copy_(new) if state_indices is None else into_rows(x, new, state_indices)
        if state_indices is not None:
            outputs = [o.masked_fill(without_state(state_indices, sequences, o), 0) for o in outputs]
    return alone(outputs)


def from_rows(pool: Tensor, rows_N: Tensor) -> Tensor:
    """[N, ...] of a pool [P, ...], zeros for a sequence without a row."""
    return pool[rows_N.clamp_min(0).long()].masked_fill(like_rows(rows_N < 0, pool), 0)


def into_rows(pool: Tensor, new: Tensor, rows_N: Tensor) -> None:
    """Write new [N, ...] into the rows of a pool, without waiting for the device. A sequence without a row cannot be left out,
    because the number of rows would have to be read: in its place another one is written once more."""
    if not len(rows_N):
        return
    has_row = rows_N >= 0
    source = torch.where(has_row, torch.arange(len(rows_N), device=rows_N.device), has_row.int().argmax())
    rows = rows_N[source].clamp_min(0).long()
    pool[rows] = torch.where(like_rows(has_row[source], pool), new[source].to(pool.dtype), pool[rows])


def like_rows(x: Tensor, like: Tensor) -> Tensor:
    """x [N] in a shape that broadcasts over [N, ...]."""
    return x.view(-1, *[1] * (like.ndim - 1))


def without_state(indices: Tensor, sequences: Sequences, o: Tensor) -> Tensor:
    """Which tokens of o [B, T, ...] belong to a sequence with a negative index."""
    if sequences.lengths is None:
        return like_rows(indices < 0, o)
    return like_rows((indices < 0)[sequences.index_of_token(o.device)], o[0])[None]
