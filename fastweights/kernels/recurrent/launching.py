"""What all recurrent kernels have in common: tiles and the launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..common.call import padded
from ..runtime.launch_plan import device_of, launch
from . import RecurrentCall
from .states import PlacedState
from .tokens import strides

__all__ = ["Tile", "choose_columns", "launch_recurrent", "whole_state"]


class Tile(NamedTuple):
    """What a program owns of a head's state: rows and columns, powers of two, and its warps."""

    rows: int
    columns: int
    warps: int


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
    kernel: Any, call: RecurrentCall, tile: Callable[[int, int], Tile], *, inputs: Sequence[str], states: Sequence[str],
    outputs: Sequence[bool] = (True,), parameters: Sequence[Any] = (), more: Sequence[Any] = (), numbers: Sequence[float] = (),
    **constants: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The outputs [B, T, HV, V]. The kernel's arguments are the inputs, `parameters`, the outputs (None where not wanted), the
    states, `more`, state_indices, P, cu_seqlens, T, `numbers` and the constants."""
    v, key = call.inputs["v"], call.inputs["k"].shape[3]
    *sizes, value = v.shape
    rows, width, warps = tile(key, value)
    made = [v.new_empty(v.shape) if wanted else None for wanted in outputs]
    programs = call.sequences * sizes[2] * -(-value // width)
    if programs:
        given = [strides(call.inputs.get(name), *sizes) for name in inputs]
        placed = [PlacedState.of(call, name) for name in states]
        pool = len(call.states[states[0]])
        with device_of(v):
            launch(
                kernel, (programs,), *[x for each in given for x in each], *parameters, *made,
                *[x for each in placed for x in each.arguments], *more, call.state_indices, pool, call.cu_seqlens, sizes[1],
                *numbers, **constants, HV=sizes[2], K=key, V=value, BK=rows, BV=width, num_warps=warps,
            )  # fmt: skip
        for state in placed:
            state.finish()
    return tuple(x for x in made if x is not None)
