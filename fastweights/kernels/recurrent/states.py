"""The states of recurrent kernels: one per sequence, or rows of a pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.packing import pool_row
from . import RecurrentCall

__all__ = ["PlacedState", "head_number", "state_tile"]


class PlacedState:
    """A state as a kernel takes it: where it is read and written, and the strides from row to row and from head to head."""

    def __init__(self, state: Tensor, new_state: Tensor | None) -> None:
        self.wanted = state if new_state is None else new_state
        if new_state is None:  # in place
            self.source = self.target = state if heads_are_dense(state) else state.contiguous()
        else:
            self.source = state.contiguous()
            self.target = self.wanted if self.wanted.is_contiguous() else torch.empty(state.shape, device=state.device)

    @classmethod
    def of(cls, call: RecurrentCall, name: str) -> PlacedState:
        return cls(call.states[name], None if call.new_states is None else call.new_states[name])

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        row, head = self.source.stride()[:2]
        return self.source, self.target, row, head

    def finish(self) -> None:
        """After the launch: a state of a layout that the kernel does not write receives the numbers."""
        if self.target is not self.wanted:
            self.wanted.copy_(self.target)


def heads_are_dense(state: Tensor) -> bool:
    """Whether the numbers of each head are contiguous; rows and heads may lie anywhere."""
    step = 1
    for size, stride in zip(reversed(state.shape[2:]), reversed(state.stride()[2:])):
        if stride != step and size > 1:
            return False
        step *= size
    return True


@triton.jit
def head_number(place, HV: tl.constexpr):
    """The head of place n HV + head, in 64 bits: a view of a large tensor may have any stride from head to head."""
    return (place % HV).to(tl.int64)


@triton.jit
def program_head(state_indices, P, HV: tl.constexpr, TILES: tl.constexpr = 1):
    """Of a program of a grid (N HV TILES): its tile of columns, the number of its sequence and head together, its sequence, its
    head, the row of its states in their pool of P rows, and whether there is one."""
    place = tl.program_id(0) // TILES
    n = place // HV
    index, held = pool_row(state_indices, n, P)
    return tl.program_id(0) % TILES, place, n, head_number(place, HV), index, held


@triton.jit
def state_tile(S, index, row_step, head, head_step, held, row, column, K: tl.constexpr, V: tl.constexpr):
    """Where the rows and columns of a head's state [K, V] lie, which of them exist, and their numbers, 0 where there are none."""
    at = index * row_step + head * head_step + (row[:, None] * V + column[None, :])
    exists = (row < K)[:, None] & (column < V)[None, :] & held
    # A call uses each number of the state once, so the state does not displace weights and activations from the caches.
    return at, exists, tl.load(S + at, mask=exists, other=0, eviction_policy="evict_first")
