"""Elementwise Longhorn by kernels: the launches of a forward and of a backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..chunk.sizes import CallSizes, max_pieces
from ..chunk.tiles import padded
from ..packing import CHUNK
from ..posterior.memory import add_tiles
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .gradients import element_gradients
from .read import read_elements

__all__ = ["ELEMENTWISE", "ElementwiseInputs"]

COLUMNS = 16  # of a program's tile
NUMBERS_PER_WARP = 1024  # of a state: 32 per thread, which leaves registers for its gradient and the state loaded ahead
WARPS = 1024  # of a backward: about as many as run at the same time, for each of them has a scratch of 64 states


class ElementwiseInputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V]; beta [B, T, H or HV, V]; S [N, HV, K, V] or None; cu_seqlens [N+1] or None, on the
    device."""

    q: Any
    k: Any
    v: Any
    beta: Any
    S: Any = None
    cu_seqlens: Any = None


class ElementwiseSizes(CallSizes):
    """tiles: of columns, each a program per sequence and head."""

    def __init__(self, x: ElementwiseInputs) -> None:
        super().__init__(x)
        self.tiles = -(-self.V // COLUMNS)
        self.grid = (self.tiles * self.N, self.HV)
        self.constants = {
            "K": self.K, "PK": padded(self.K), "V": self.V, "BV": COLUMNS, "HEADS_K": self.group(x.k),
            "HEADS_BETA": self.group(x.beta), "num_warps": max(1, padded(self.K) * COLUMNS // NUMBERS_PER_WARP),
        }  # fmt: skip


Outputs = tuple[tuple[TensorSpec | None, ...], tuple[()]]


def shapes(x: ElementwiseInputs, device: torch.device, options: Sequence[Any], final: bool) -> Outputs:
    """o and S (None unless `final`). A backward needs the inputs alone."""
    sizes = CallSizes(x)
    return (sizes.per_token(sizes.HV, sizes.V, dtype=x.v.dtype), sizes.state(sizes.N) if final else None), ()


def forward(
    recorder: Recorder, x: ElementwiseInputs, device: torch.device, options: Sequence[Any], final: bool
) -> Outputs:
    (scale,), sizes = options, ElementwiseSizes(x)
    (o, end), saved = shapes(x, device, options, final)
    recorder.launch(
        read_elements, sizes.grid,
        x.q, x.k, x.v, x.beta, x.S, o, end, None, x.cu_seqlens, sizes.T, scale, sizes.HV, **sizes.constants,
    )  # fmt: skip
    return (o, end), saved


def backward(
    recorder: Recorder, x: ElementwiseInputs, device: torch.device, options: Sequence[Any], saved: tuple[()],
    output_grads: Sequence[Any], state_grads: bool,
) -> ElementwiseInputs:  # fmt: skip
    (scale,), (do, d_end), sizes = options, output_grads, ElementwiseSizes(x)
    HV, K, float32 = sizes.HV, sizes.K, torch.float32
    states = sizes.state(max_pieces(sizes.N, sizes.T, CHUNK, sizes.packed))
    recorder.launch(
        read_elements, sizes.grid,
        x.q, x.k, x.v, x.beta, x.S, None, None, states, x.cu_seqlens, sizes.T, scale, HV, **sizes.constants,
    )  # fmt: skip
    dq, dk = (sizes.per_token(HV, K) for _ in range(2))
    dv, dbeta = (sizes.per_token(HV, sizes.V, dtype=y.dtype) for y in (x.v, x.beta))
    alone = sizes.tiles == 1
    parts = [y if alone else TensorSpec((sizes.tiles, *y.shape), float32) for y in (dq, dk)]
    items = prod(sizes.grid)
    programs = min(items, max(1, WARPS // sizes.constants["num_warps"]))
    scratch = sizes.empty(programs, CHUNK, padded(K), COLUMNS, dtype=float32)
    d_start = sizes.state(sizes.N) if state_grads and x.S is not None else None
    recorder.launch(
        element_gradients, (programs,),
        x.q, x.k, x.v, x.beta, states, do, d_end, scratch, *parts, dv, dbeta, d_start, x.cu_seqlens, sizes.T, sizes.B * sizes.T,
        items, scale, HV, **sizes.constants,
    )  # fmt: skip
    if not alone:
        for part, out in zip(parts, (dq, dk)):
            add_tiles(recorder, part, out)
    return ElementwiseInputs(dq, dk, dv, dbeta, d_start)


# Inputs: ElementwiseInputs. Options: the scale of q. Outputs: o, S.
ELEMENTWISE = Rule(shapes, forward, backward)
