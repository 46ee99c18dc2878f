"""States of sequences out of a pool and into it, by their rows: by one kernel on a GPU, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from .few_tokens import needs_gradient
from .node import load_module

__all__ = ["broadcast_rows", "read_rows", "read_rows_in_torch", "write_rows", "write_rows_in_torch"]

MOVED = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def read_rows(
    pool: Tensor, rows_N: Tensor, dtype: torch.dtype | None = None, backend: str = "auto", first: Tensor | None = None
) -> Tensor:
    """[N, ...] of a pool [P, ...] in a dtype, its own when None; for a negative row `first` [1, ...], zeros when None. Of rows
    [N, 1 + S] the first column is read."""
    rows_N = rows_N if rows_N.ndim == 1 else rows_N[:, 0]
    dtype, states = pool.dtype if dtype is None else dtype, None
    if takes_kernel(backend, pool, dtype, first):
        states = load_module("pointwise.pool_rows").copy_from_pool(pool, rows_N, dtype, first)
    return read_rows_in_torch(pool, rows_N, dtype, first) if states is None else states


def write_rows(pool: Tensor, new: Tensor, rows_N: Tensor, backend: str = "auto") -> None:
    """Write new [N, ...] of any dtype into the rows of a pool. A negative row is none."""
    served = takes_kernel(backend, pool, new.dtype, new)
    if not served or not load_module("pointwise.pool_rows").copy_to_pool(pool, new, rows_N):
        write_rows_in_torch(pool, new, rows_N)


def takes_kernel(backend: str, pool: Tensor, dtype: torch.dtype, states: Tensor | None = None) -> bool:
    """Whether the kernel serves these dtypes: no gradients, no graph that is traced. Compiled, the form in PyTorch is one kernel
    or two."""
    return (
        backend != "reference"
        and not torch.compiler.is_compiling()
        and pool.dtype in MOVED
        and dtype in MOVED
        and takes_kernels(backend, pool)
        and not needs_gradient({"pool": pool, "states": states})
    )


def read_rows_in_torch(pool: Tensor, rows_N: Tensor, dtype: torch.dtype, first: Tensor | None = None) -> Tensor:
    states, without = pool[rows_N.clamp_min(0).long()], broadcast_rows(rows_N < 0, pool)
    if first is None:
        return states.masked_fill(without, 0).to(dtype)
    return torch.where(without, first.to(dtype), states.to(dtype))


def write_rows_in_torch(pool: Tensor, new: Tensor, rows_N: Tensor) -> None:
    """A sequence without a row cannot be left out, because the number of rows would have to be read: in its place another one is
    written once more."""
    if not len(rows_N):
        return
    has_row = rows_N >= 0
    source = torch.where(has_row, torch.arange(len(rows_N), device=rows_N.device), has_row.int().argmax())
    rows = rows_N[source].clamp_min(0).long()
    pool[rows] = torch.where(broadcast_rows(has_row[source], pool), new[source].to(pool.dtype), pool[rows])


def broadcast_rows(x: Tensor, like: Tensor) -> Tensor:
    """x [N] in a shape that broadcasts over [N, ...]."""
    return x.view(-1, *[1] * (like.ndim - 1))
