"""Calls that read a few tokens and update a state in place. A new state for every token would double the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import check_tensor, shape_of, values_are_checked
from ...kernels.availability import takes_kernels
from ...kernels.recurrent import RecurrentCall
from .checks import FEW_TOKENS, Sizes, as_tuple, check_inputs, check_options, compute_dtype
from .few_tokens import move_lengths
from .pool_rows import broadcast_rows, read_rows, write_rows
from .sequences import Sequences, check_cu_seqlens
from .spec import BACKENDS, OpSpec

__all__ = ["InPlace", "update_state"]


class InPlace:
    """Stands in the place of an initial state. It holds the states, a tensor or a tuple, that the final states overwrite. With
    rows [N] these are pools of states, and sequence n has row rows[n]. With rows [N, 1 + S] it reads row rows[n, 0], and the
    state after its token t goes to row rows[n, 1 + t]."""

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
    states, rows = check_place(spec, place, sizes, sequences, like), place.rows
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
        indices = None if rows is None else rows.contiguous()
        return as_tuple(
            kernel.decode(RecurrentCall(named, dict(zip(spec.states, held)), values, None, lengths, indices))
        )
    with torch.no_grad():
        sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T, read=True)
        if rows is not None and rows.ndim == 2:
            if sizes.T:
                return keep_each_state(run, spec, inputs, options, held, rows, sequences, backend)
            rows = rows[:, 0]
        before = held if rows is None else tuple(read_rows(x, rows, backend=backend) for x in held)
        outputs, final = run(spec, inputs, options, before, True, cu_seqlens, backend)
        outputs, finals = as_tuple(outputs), as_tuple(final)
        if not all(sequences.lengths or (sizes.T,)):  # a sequence without tokens keeps its state, to the last bit
            longer = torch.tensor(sequences.lengths or [sizes.T] * sizes.B, device=like.device) > 0
            finals = tuple(torch.where(broadcast_rows(longer, x), x, old) for x, old in zip(finals, before))
        for x, new in zip(held, finals):
            x.copy_(new) if rows is None else write_rows(x, new, rows, backend)
        if rows is not None:
            outputs = tuple(o.masked_fill(find_stateless_tokens(rows, sequences, o), 0) for o in outputs)
    return outputs


def keep_each_state(
    run: Callable[..., Any],
    spec: OpSpec,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    pools: tuple[Tensor, ...],
    rows: Tensor,
    sequences: Sequences,
    backend: str,
) -> tuple[Any, ...]:
    """`update_state` for rows [N, 1 + S], token by token. The work of rows of one length can be captured."""
    is_token = [name not in spec.parameters and x is not None for name, x in zip(spec.inputs, inputs)]
    if sequences.lengths is None:
        steps: list[Any] = [((slice(None), slice(t, t + 1)), slice(None)) for t in range(sequences.time)]
    else:
        steps = find_steps(sequences.lengths, rows.device)
    states = tuple(read_rows(x, rows, backend=backend) for x in pools)
    results: tuple[Tensor, ...] = ()
    for t, (tokens, here) in enumerate(steps):
        given = [x[tokens] if chosen else x for x, chosen in zip(inputs, is_token)]
        outputs, final = run(spec, given, options, tuple(x[here] for x in states), True, None, backend)
        outputs = tuple(o.masked_fill(broadcast_rows(rows[here, 0] < 0, o), 0) for o in as_tuple(outputs))
        results = results or tuple(o.new_empty(*inputs[0].shape[:2], *o.shape[2:]) for o in outputs)
        for whole, o in zip(results, outputs):
            whole[tokens] = o
        for pool, state, new in zip(pools, states, as_tuple(final)):
            state[here] = new
            write_rows(pool, new, rows[here, 1 + t].where(rows[here, 0] >= 0, -1), backend)
    return results


def find_steps(lengths: tuple[int, ...], device: torch.device) -> list[tuple[tuple[int, Tensor], Tensor]]:
    """By number of a token in its sequence: where such tokens are in a packed row, as an index that gives [N', 1, ...], and the
    numbers of their sequences."""
    first, steps = [0, *itertools.accumulate(lengths)], []
    for t in range(max(lengths)):
        here = [n for n, length in enumerate(lengths) if length > t]
        tokens = torch.tensor([[first[n] + t] for n in here], device=device)
        steps.append(((0, tokens), torch.tensor(here, device=device)))
    return steps


def check_place(spec: OpSpec, place: InPlace, sizes: Sizes, sequences: Sequences, like: Tensor) -> dict[str, Tensor]:
    """Check the states of the sequences. Returns them by the names that messages give them."""
    states, count = as_tuple(place.state), sequences.count
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
        check_state_indices(place.rows, sequences, held, like)
    return dict(zip(labels, states))


def check_length(op: str, sequences: Sequences) -> None:
    longest = find_longest(sequences)
    if longest > FEW_TOKENS:
        raise ValueError(f"T must be at most {FEW_TOKENS} tokens per sequence, got {longest}; use {op} for more")


def find_longest(sequences: Sequences) -> int:
    """The most tokens of a sequence; where lengths are not read the least that this may be."""
    if sequences.lengths is None and sequences.cu_seqlens is not None:
        return -(-sequences.time // sequences.count)
    return max(sequences.lengths or (sequences.time,))


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


def check_state_indices(indices: Any, sequences: Sequences, pool: int, like: Tensor) -> None:
    """Check shape and dtype, and the numbers where they can be read: on a GPU only with FASTWEIGHTS_CHECK_VALUES=1."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"state_indices must be an integer tensor [N], got {type(indices).__name__}")
    count = sequences.count
    has_shape = tuple(indices.shape) == (count,) or (indices.ndim == 2 and len(indices) == count)
    if indices.dtype not in (torch.int32, torch.int64) or not has_shape:
        raise ValueError(
            f"state_indices must be int32 or int64 [{count}], one for each sequence, or [{count}, 1 + S] for the states after up "
            f"to S tokens, got {indices.dtype} {shape_of(indices)}"
        )
    check_columns("state_indices", indices, sequences)
    if indices.device != like.device:
        raise ValueError(
            f"state_indices must be on the device of the other inputs, {like.device}, got {indices.device}; move it there"
        )
    if not values_are_checked(indices):
        return
    listed = indices.tolist() if indices.ndim == 2 else [[row] for row in indices.tolist()]
    largest = max((row for of_sequence in listed for row in of_sequence), default=-1)
    if largest >= pool:
        raise ValueError(
            f"state_indices must be less than the number of states in the pool, {pool}, got {largest}; pass a negative index "
            "for a sequence without a state"
        )
    check_written_rows(listed)


def check_columns(name: str, rows: Tensor, sequences: Sequences) -> None:
    """ValueError where rows [N, 1 + S] are fewer than sequences have tokens."""
    longest = find_longest(sequences)
    if rows.ndim == 2 and rows.shape[1] < 1 + longest:
        raise ValueError(
            f"{name} must have a column for what a sequence reads and one for each of its {longest} tokens, got "
            f"{shape_of(rows)}; fill it up with negative indices"
        )


def check_written_rows(indices: list[list[int]]) -> None:
    """No row may be written twice, or be read by one sequence and written by another."""
    owner: dict[int, int] = {}
    for n, of_sequence in enumerate(indices):
        for row in of_sequence[1:] or of_sequence:
            if row >= 0 and row in owner:
                raise ValueError(
                    f"state_indices must not repeat, as sequences overwrite their states, got {indices}; give each sequence its "
                    "own state"
                )
            owner[row] = n
    for n, (read, *_) in enumerate(indices):
        if read >= 0 and owner.get(read, n) != n:
            raise ValueError(
                f"state_indices must not give a sequence the row {read} to read that another one overwrites, got {indices}; copy "
                "the state first"
            )


def check_no_gradient(op: str, tensors: Mapping[str, Any]) -> None:
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient, as the state is overwritten; call under torch.no_grad() or use {op}"
            )


def find_stateless_tokens(indices: Tensor, sequences: Sequences, o: Tensor) -> Tensor:
    """Which tokens of o [B, T, ...] belong to a sequence with a negative index."""
    if sequences.lengths is None:
        return broadcast_rows(indices < 0, o)
    return broadcast_rows((indices < 0)[sequences.index_of_token(o.device)], o[0])[None]
