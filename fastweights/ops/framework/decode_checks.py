"""Checks of what the ops that update a state in place take besides the arguments of their op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...checks import check_tensor, shape_of, values_are_checked
from .checks import FEW_TOKENS, compute_dtype
from .sequences import Sequences

__all__ = ["check_length", "check_no_gradient", "check_state", "check_state_indices", "pool_size"]


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
    """Its numbers, where they can be read: on a GPU only with FASTWEIGHTS_CHECK_VALUES=1."""
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
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient, as the state is overwritten; call under torch.no_grad() or use {op}"
            )
