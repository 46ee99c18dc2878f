"""Kernel that copies the states of sequences out of a pool [P, ...] or into it, by their rows, where a negative row is none.

The numbers of a state are seen as [A, R, C], with strides of their own on each side: a pool may be a view of padded pages, or
have its heads transposed. A program has a tile of R and C of one sequence. Where C is dense in one tensor and R in the other, the
tile is square, so that both sides are read and written in whole lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.overlap import wait_for_inputs
from ..common.packing import pool_row
from ..runtime.launch_plan import launch

NUMBERS = 4096  # of a program
SQUARE = 64  # rows and columns of a tile that is transposed
PER_THREAD = 16


@triton.jit(do_not_specialize=["P", "rows_step"], do_not_specialize_on_alignment=["rows"])
def move_rows(
    source, target, first, rows, P, rows_step, source_step, target_step,
    SOURCE_A: tl.constexpr, SOURCE_R: tl.constexpr, SOURCE_C: tl.constexpr, TARGET_A: tl.constexpr, TARGET_R: tl.constexpr,
    TARGET_C: tl.constexpr, A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    READS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """READS: whether the source is the pool. first: what a state without a row is read as, 0 when None. Places are computed in 64
    bits, as a view of a large pool may have any strides."""
    wait_for_inputs(OVERLAP)
    ACROSS: tl.constexpr = (C + BC - 1) // BC
    DOWN: tl.constexpr = (R + BR - 1) // BR
    place = tl.program_id(0)
    c = (place % ACROSS * BC + tl.arange(0, BC))[None, :]
    r = (place // ACROSS % DOWN * BR + tl.arange(0, BR))[:, None]
    place = place // (ACROSS * DOWN)
    a, n = (place % A).to(tl.int64), (place // A).to(tl.int64)
    index, held = pool_row(rows, n * rows_step, P)
    inside = (r < R) & (c < C)
    r, c = r.to(tl.int64), c.to(tl.int64)
    given, wanted = (index, n) if READS else (n, index)
    at = given * source_step + a * SOURCE_A + r * SOURCE_R + c * SOURCE_C
    x = tl.load(source + at, inside & held, 0).to(target.dtype.element_ty)
    at = a * TARGET_A + r * TARGET_R + c * TARGET_C
    if first is not None:
        x = tl.where(held, x, tl.load(first + at, inside & (not held), 0).to(target.dtype.element_ty))
    tl.store(target + wanted * target_step + at, x, inside if READS else inside & held)


class Moves(NamedTuple):
    """How a kernel copies one state: the programs that do it, their warps, and what is compiled in."""

    programs: int
    warps: int
    constants: Mapping[str, int]


@lru_cache(maxsize=256)
def plan_moves(sizes: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> Moves | None:
    """How states of these sizes are copied from strides to strides. None where more than three dimensions remain after those that
    follow one another in both tensors are joined."""
    dims = list[tuple[int, int, int]]()  # source stride, target stride, size
    for given, wanted, size in sorted(zip(source, target, sizes), key=lambda dim: -dim[1]):
        if dims and dims[-1][:2] == (given * size, wanted * size):
            dims[-1] = given, wanted, dims[-1][2] * size
        elif size != 1:
            dims.append((given, wanted, size))
    if len(dims) > 3:
        return None
    *others, last = dims or [(1, 1, 1)]
    dims = [*[(1, 1, 1)] * (2 - len(others)), *sorted(others, reverse=True), last]
    named = {
        f"{name}{dim}": x for dim, of_dim in zip("ARC", dims) for name, x in zip(("SOURCE_", "TARGET_", ""), of_dim)
    }
    parts, rows, columns = (size for *_, size in dims)
    turned = rows > 1 and dims[1][0] < last[0]
    width = min(padded(columns, 1), max(SQUARE, NUMBERS // padded(rows, 1)) if turned else NUMBERS)
    height = min(padded(rows, 1), NUMBERS // width)
    programs, warps = parts * -(-rows // height) * -(-columns // width), max(1, height * width // (32 * PER_THREAD))
    return Moves(programs, warps, {**named, "BR": height, "BC": width})


@lru_cache(maxsize=256)
def plan_read(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Moves | None:
    """How states of these sizes and strides are copied out of a pool, one after the other; None as in `plan_moves`."""
    return plan_moves(sizes, strides, contiguous_strides(sizes))


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))


def read_rows(pool: Tensor, rows: Tensor, dtype: torch.dtype, first: Tensor | None = None) -> Tensor | None:
    """[N, ...], contiguous; for a sequence without a row `first` [1, ...], 0 when None. None where the kernel does not serve the
    strides of the pool."""
    sizes = pool.shape[1:]
    moves = plan_read(sizes, pool.stride()[1:])
    if moves is None:
        return None
    states = pool.new_empty((len(rows), *sizes), dtype=dtype)
    move(moves, pool, states, rows, len(pool), True, None if first is None else first.contiguous())
    return states


def write_rows(pool: Tensor, new: Tensor, rows: Tensor) -> bool:
    """Write new [N, ...] into the rows. False where the kernel does not serve the strides."""
    moves = plan_moves(pool.shape[1:], new.stride()[1:], pool.stride()[1:])
    if moves is not None:
        move(moves, new, pool, rows, len(pool), False)
    return moves is not None


def move(
    moves: Moves, source: Tensor, target: Tensor, rows: Tensor, held: int, reads: bool, first: Tensor | None = None
) -> None:
    launch(
        move_rows, (len(rows) * moves.programs,), source, target, first, rows, held, rows.stride(0), source.stride(0),
        target.stride(0), **moves.constants, READS=reads, num_warps=moves.warps,
    )  # fmt: skip
