"""Calls that read a few tokens and update a state in place. A new state for every token would double the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import check_tensor, shape_of, values_are_checked
from ...kernels.availability import takes_kernels
from ...kernels.recurrent import RecurrentCall
from .checks import FEW_TOKENS, Sizes, as_tuple, check_inputs, check_options, compute_dtype
from .few_tokens import move_lengths
from .pool_rows import broadcast_rows, gather_rows, scatter_rows
from .sequences import Sequences, check_cu_seqlens
from .spec import BACKENDS, OpSpec

__all__ = ["InPlace", "read_rows", "write_rows", "update_state"]


class InPlace:
    """Stands in the place of an initial state. It holds the states, a tensor or a tuple, that the final states overwrite. With
    rows [N] these are pools of states, and sequence n has row rows[n]."""

    __slots__ = ("rows", "state")

    def __init__(self, state: Any, rows: Tensor | None = None) -> None:
        self.state, self.rows = state, rows


def update_state(
    run: Callable[..., Any],
    spec: OpSpec,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    place: InPlace,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Any, ...]:
    """The outputs of a call whose final states overwrite those of `place`. Where the recurrent kernel does not take the call,
    run(spec, inputs, options, initial state, True, cu_seqlens, backend) computes the final states, which are then copied."""
    sizes, like = check_inputs(spec, inputs), inputs[0]
    values = check_options(spec, options, sizes)
    sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T, like=like)
    check_length(spec.name, sequences)
    states, rows = check_place(spec, place, sizes, sequences.count, like), place.rows
    named = dict(zip(spec.inputs, inputs))
    if torch.is_grad_enabled():
        check_no_gradient(spec.name, {**named, **states})
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    kernel, held = spec.recurrent, tuple(states.values())
    if (
        backend != "reference"
        and kernel is not None
        and kernel.takes(named, values, sizes.K)
        and takes_kernels(backend, like)
    ):
        for name in spec.parameters:
            named[name] = kernel.parameter(name, named[name], sizes, like)
        lengths = move_lengths(cu_seqlens, like)
        return as_tuple(kernel.decode(RecurrentCall(named, dict(zip(spec.states, held)), values, None, lengths, rows)))
    with torch.no_grad():
        sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T, read=True)
        before = held if rows is None else tuple(gather_rows(x, rows, backend=backend) for x in held)
        outputs, final = run(spec, inputs, options, before, True, cu_seqlens, backend)
        outputs, finals = as_tuple(outputs), as_tuple(final)
        if not all(sequences.lengths or (sizes.T,)):  # a sequence without tokens keeps its state, to the last bit
            longer = torch.tensor(sequences.lengths or [sizes.T] * sizes.B, device=like.device) > 0
            finals = tuple(torch.where(broadcast_rows(longer, x), x, old) for x, old in zip(finals, before))
        for x, new in zip(held, finals):
            x.copy_(new) if rows is None else scatter_rows(x, new, rows, backend)
        if rows is not None:
            outputs = tuple(o.masked_fill(find_stateless_tokens(rows, sequences, o), 0) for o in outputs)
    return outputs


def check_place(spec: OpSpec, place: InPlace, sizes: Sizes, count: int, like: Tensor) -> dict[str, Tensor]:
    """Check the states of `count` sequences. Returns them by the names that messages give them."""
    states = as_tuple(place.state)
    if len(states) != len(spec.states):
        raise ValueError(
            f"state must be ({', '.join(spec.states)}), the {len(spec.states)} tensor(s) of {spec.name}'s final state, "
            f"got {len(states)}; pass a call's final state"
        )
    labels = [f"state {name}" for name in spec.states] if len(states) > 1 else ["state"]
    held = count if place.rows is None else pool_size(labels[0], states[0])
    for label, x, declared in zip(labels, states, spec.states.values()):
        check_state(label, x, (held, *sizes.shape(declared.dims)), like, integer=declared.counts)
    if place.rows is not None:
        check_state_indices(place.rows, count, held, like)
    return dict(zip(labels, states))


def check_length(op: str, sequences: Sequences) -> None:
    if sequences.lengths is None and sequences.cu_seqlens is not None:
        longest = -(-sequences.time // sequences.count)  # at least
    else:
        longest = max(sequences.lengths or (sequences.time,))
    if longest > FEW_TOKENS:
        raise ValueError(f"T must be at most {FEW_TOKENS} tokens per sequence, got {longest}; use {op} for more")


def pool_size(name: str, pool: Any) -> int:
    if isinstance(pool, Tensor) and (pool.ndim == 0 or len(pool) == 0):
        raise ValueError(f"{name} must be a pool of at least one state with state_indices, got {shape_of(pool)}")
    return len(pool) if isinstance(pool, Tensor) else 1


def check_state(name: str, state: Any, shape: tuple[int, ...], like: Tensor, integer: bool = False) -> None:
    check_tensor(name, state, like, integer=integer)
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {shape_of(state)}")
    dtype = torch.int64 if integer else compute_dtype(like)
    if state.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} for {like.dtype} inputs, got {state.dtype}; convert it")
    if any(step == 0 and n > 1 for step, n in zip(state.stride(), state.shape)):
        raise ValueError(f"{name} must have a place in memory for each number, as it is overwritten; pass a clone")


def check_state_indices(indices: Any, count: int, pool: int, like: Tensor) -> None:
    """Check shape and dtype, and the numbers where they can be read: on a GPU only with FASTWEIGHTS_CHECK_VALUES=1."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"state_indices must be an integer tensor [N], got {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64) or tuple(indices.shape) != (count,):
        raise ValueError(
            f"state_indices must be int32 or int64 [{count}], one for each sequence, got {indices.dtype} {shape_of(indices)}"
        )
    if indices.device != like.device:
        raise ValueError(
            f"state_indices must be on the device of the other inputs, {like.device}, got {indices.device}; move it there"
        )
    if not values_are_checked(indices):
        return
    rows = [row for row in indices.tolist() if row >= 0]
    if any(row >= pool for row in rows):
        raise ValueError(
            f"state_indices must be less than the number of states in the pool, {pool}, got {max(rows)}; pass a negative index "
            "for a sequence without a state"
        )
    if len(set(rows)) < len(rows):
        raise ValueError(
            f"state_indices must not repeat, as sequences overwrite their states, got {rows}; give each sequence its own state"
        )


def check_no_gradient(op: str, tensors: Mapping[str, Any]) -> None:
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient, as the state is overwritten; call under torch.no_grad() or use {op}"
            )


def read_rows(pool: Tensor, rows_N: Tensor) -> Tensor:
    """[N, ...] of a pool [P, ...], zeros for a sequence without a row."""
    return gather_rows(pool, rows_N)


def write_rows(pool: Tensor, new: Tensor, rows_N: Tensor) -> None:
    """Write new [N, ...] into the rows of a pool, without waiting for the device. A sequence without a row writes nothing."""
    scatter_rows(pool, new, rows_N)


def find_stateless_tokens(indices: Tensor, sequences: Sequences, o: Tensor) -> Tensor:
    """Which tokens of o [B, T, ...] belong to a sequence with a negative index."""
    if sequences.lengths is None:
        return broadcast_rows(indices < 0, o)
    return broadcast_rows((indices < 0)[sequences.index_of_token(o.device)], o[0])[None]
