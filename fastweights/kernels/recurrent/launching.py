"""What all recurrent kernels have in common: tiles, inputs of any layout, states (one per sequence, or
rows of a pool), and the launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.overlap import FETCHED, prefetch_lines
from ..common.packing import pool_row
from ..runtime.launch_plan import launch
from . import RecurrentCall


class PlacedState:
    """A state as a kernel takes it: where it is read and written, and the strides from row to row and from head to head.
    value_first: whether each head's numbers lie as [V, K], see `values_lie_first`."""

    def __init__(self, call: RecurrentCall, name: str, value_first: bool = False) -> None:
        state, new_state = call.states[name], None if call.new_states is None else call.new_states[name]
        self.wanted = state if new_state is None else new_state
        if new_state is None:  # in place
            self.source = self.target = state if value_first or heads_are_dense(state) else state.contiguous()
        else:
            self.source = state.contiguous()
            self.target = self.wanted if self.wanted.is_contiguous() else torch.empty(state.shape, device=state.device)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        row, head = self.source.stride()[:2]
        return self.source, self.target, row, head

    def finish(self) -> None:
        """After the launch: a state of a layout that the kernel does not write receives the numbers."""
        if self.target is not self.wanted:
            self.wanted.copy_(self.target)


def values_lie_first(call: RecurrentCall, name: str) -> bool:
    """Whether a state [K, V] that is updated in place is the transpose of contiguous heads [V, K], as vLLM has them."""
    state = call.states[name]
    return call.new_states is None and not heads_are_dense(state) and heads_are_dense(state.mT)


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
def program_head(state_indices, P, HV: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr = 1):
    """Of a program of a grid (N HV TILES): its tile of columns, the number of its sequence and head together, its sequence, its
    head, the row of its states in their pool of P rows, and whether there is one. ROWS: how many rows a sequence has in
    state_indices, the one that it reads first."""
    place = tl.program_id(0) // TILES
    n = place // HV
    index, held = pool_row(state_indices, n * ROWS, P)
    return tl.program_id(0) % TILES, place, n, head_number(place, HV), index, held


@triton.jit
def state_tile(
    S, index, row_step, head, head_step, held, row, column, K: tl.constexpr, V: tl.constexpr,
    VALUE_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Where the rows and columns of a head's state [K, V] lie, which of them exist, and their numbers, 0 where there are none.
    VALUE_FIRST: the numbers lie as [V, K]."""
    inside = row[:, None] + column[None, :] * K if VALUE_FIRST else row[:, None] * V + column[None, :]
    at = index * row_step + head * head_step + inside
    exists = (row < K)[:, None] & (column < V)[None, :] & held
    # A call uses each number of the state once, so the state does not displace weights and activations from the caches.
    return at, exists, tl.load(S + at, mask=exists, other=0, eviction_policy="evict_first")


@triton.jit
def keep_state(pool, at, exists, state, index, row_step, state_indices, n, t, P, ROWS: tl.constexpr):
    """Write the state after token t of sequence n, which began in row `index`, into the row that this token has, if any. at,
    exists: where its numbers would lie in row `index`, and which there are."""
    inside = t < ROWS - 1
    row, kept = pool_row(state_indices, tl.where(inside, n * ROWS + 1 + t, 0), P)
    tl.store(pool + (at + (row - index) * row_step), state, mask=exists & inside & kept, eviction_policy="evict_first")


@triton.jit
def fetch_state(S, S_step, S_head, channel, P, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Begin to bring the program's columns of a state [K, V] into the GPU's cache, where the states are no rows of a pool and
    the programs are few enough that all have room there."""
    if tl.num_programs(0) <= FETCHED:
        tile, _, n, head, _, _ = program_head(None, P, HV, 1, (V + BV - 1) // BV)
        row = tl.minimum(channel, K - 1) * V + tile * BV
        prefetch_lines(S + n.to(tl.int64) * S_step + head * S_head + row)


def strides(x: Tensor | None, heads: int) -> tuple[Tensor | None, int, int, int]:
    """x [B, T, h, ...], its strides from token to token and from head to head, and the value heads that one head serves."""
    if x is None:
        return None, 0, 0, 1
    steps, (batch, time) = x.stride(), x.shape[:2]
    if (len(steps) == 4 and steps[3] != 1) or (batch > 1 and time > 1 and steps[0] != time * steps[1]):
        x = x.contiguous()
        steps = x.stride()
    return x, steps[0 if time == 1 and batch > 1 else 1], steps[2], heads // x.shape[2]


def jit_options(inputs: tuple[str, ...], *others: str, numbers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Keywords of triton.jit for a kernel with x, x_token and x_head for every input x, other tensors, and numbers. Only the
    alignment of the states matters for speed: Triton would compile the kernel again for every layout of the inputs."""
    return {
        "do_not_specialize": [*numbers, *(f"{name}_{step}" for name in inputs for step in ("token", "head"))],
        "do_not_specialize_on_alignment": [*inputs, *others, "o", "state_indices", "P", "cu_seqlens", "T"],
    }


@triton.jit
def load_row(x, token, token_step, head, head_step, GROUP: tl.constexpr, channel, exists):
    """The channels of one token and head, 0 where there is none."""
    return tl.load(x + token * token_step + head // GROUP * head_step + channel, mask=exists, other=0)


@triton.jit
def load_number(x, token, token_step, head, head_step, GROUP: tl.constexpr):
    return tl.load(x + token * token_step + head // GROUP * head_step)


@triton.jit
def decay_from_log(g):
    """exp(g): 0 for -inf, which is legal, NaN for infinity, which is not."""
    g = g.to(tl.float32)
    return tl.where(g < float("inf"), tl.exp(g), float("nan"))


class Tile(NamedTuple):
    """What a program owns of a head's state: rows and columns, powers of two, its warps, and the registers of a thread at most.
    columns: 0 where the kernel knows them from the rows."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None


def choose_columns(key: int, value: int, choices: Mapping[int, tuple[int, int]]) -> Tile:
    """Some columns of the state; choices: how many and the warps, by the key channels rounded up to a power of two."""
    rows = padded(key, 1)
    width, warps = choices[max(rows, 64)]
    return Tile(rows, min(width, padded(value, 1)), warps)


def whole_state(key: int, value: int) -> Tile:
    """All of it, 64 numbers per thread of up to four warps, beyond these 128: sums across more warps cost more than they gain."""
    rows, width = padded(key, 1), padded(value, 1)
    return Tile(rows, width, max(1, min(4, rows * width // 2048), rows * width // 4096))


def launch_recurrent(
    kernel: Any, call: RecurrentCall, tile: Callable[[int, int], Tile], outputs: Sequence[Tensor | None], *,
    inputs: Sequence[str], states: Sequence[str], parameters: Sequence[Any] = (), more: Sequence[Any] = (),
    numbers: Sequence[float] = (), **constants: Any,
) -> None:  # fmt: skip
    """Fill the outputs [B, T, HV, V]; all but the first may be None. The kernel's arguments are the inputs, `parameters`, the
    outputs, the states, `more`, state_indices, P, cu_seqlens, T, `numbers` and the constants. Inputs and states that the call
    lacks are None."""
    assert outputs[0] is not None
    *sizes, value = outputs[0].shape
    key = call.inputs["k"].shape[3]
    rows, width, warps, registers = tile(key, value)
    programs = call.sequences * sizes[2]
    if width:
        programs *= -(-value // width)
        constants.update(V=value, BV=width)
    if registers is not None:
        constants["maxnreg"] = registers
    if programs:
        given = [strides(call.inputs.get(name), sizes[2]) for name in inputs]
        value_first = constants.get("VALUE_FIRST", False)
        placed = [PlacedState(call, name, value_first) if name in call.states else None for name in states]
        pool = len(call.states[states[0]])
        launch(
            kernel, (programs,), *[x for each in given for x in each], *parameters, *outputs,
            *[x for each in placed for x in (each.arguments if each else (None, None, 0, 0))], *more, call.state_indices, pool,
            call.cu_seqlens, sizes[1], *numbers, **constants, HV=sizes[2], K=key, BK=rows, ROWS=call.rows_per_sequence,
            num_warps=warps,
        )  # fmt: skip
        for state in placed:
            if state:
                state.finish()
