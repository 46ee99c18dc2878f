"""The launches of a forward and a backward where tokens also add to the inverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..chunk import sizes as chunk_sizes
from ..packing import CHUNK
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .carried import carry_inverse
from .carried_gradients import carry_adjoint, chunk_adjoint, finish_gradients
from .rule import GramSizes

__all__ = ["REFRESHED", "RefreshInputs"]


class RefreshInputs(NamedTuple):
    """u, b [B, T, h, K]; refresh [B, T, 1] in float32; A [N, HV, K, K]; cu_seqlens [N+1] or None, on the device."""

    u: Any
    b: Any
    refresh: Any
    A: Any
    cu_seqlens: Any = None


class Saved(NamedTuple):
    """In float32 the inverses at the chunks' starts [M, HV, K, K], r [BT, HV, K], d [BT, HV], T [M, HV, 64, 64]; the table of
    chunks."""

    A: Any
    R: Any
    D: Any
    T: Any
    chunk_table: Any


Results = tuple[tuple[TensorSpec | None, ...], Saved]


def shapes(x: RefreshInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    """y and A (None unless `final`), and what a backward needs."""
    sizes = GramSizes(x, x.A)
    table = TensorSpec((sizes.M, 2), torch.int32) if sizes.packed else None
    T = TensorSpec((sizes.M, sizes.HV, CHUNK, CHUNK), torch.float32)
    saved = Saved(sizes.matrices(sizes.M), sizes.vectors(), sizes.per_token(sizes.HV), T, table)
    return (sizes.vectors(), sizes.matrices(sizes.N) if final else None), saved


def forward(
    recorder: Recorder, x: RefreshInputs, device: torch.device, options: Sequence[Any], final: bool
) -> Results:  # fmt: skip
    sizes = GramSizes(x, x.A)
    (y, end), saved = shapes(x, device, options, final)
    sizes.record_table(recorder, x, saved)
    recorder.launch(
        carry_inverse, (sizes.N, sizes.HV), x.u, x.refresh, x.A, saved.A, end, x.cu_seqlens, sizes.T, sizes.HV,
        K=sizes.K, PK=sizes.PK, HEADS=sizes.group(x.u), PRECISION=sizes.precision,
        num_warps=4 if sizes.PK <= 64 else 8, num_stages=1,
    )  # fmt: skip
    sizes.record_tokens(recorder, x, saved, saved.T, None, 0.0, refresh=x.refresh)
    sizes.record_solve(recorder, x, saved, x.b, y, sizes.precision, refresh=x.refresh)
    return (y, end), saved


def backward(
    recorder: Recorder, x: RefreshInputs, device: torch.device, options: Sequence[Any], saved: Saved,
    output_grads: Sequence[Any], state_grads: bool,
) -> RefreshInputs:  # fmt: skip
    sizes = GramSizes(x, x.A)
    dy, dA_end = output_grads
    precision, grid = sizes.of_gradients, (sizes.M, sizes.HV)
    db = sizes.vectors(x.b.dtype)
    sizes.record_solve(recorder, x, saved, dy, db, precision, refresh=x.refresh)
    rounded = sizes.dtype != torch.float32
    E = sizes.matrices(sizes.M, torch.bfloat16 if rounded else torch.float32)  # E - I
    N, adjoint = sizes.matrices(sizes.M), sizes.matrices(sizes.M)
    direct, W, V, rest = (sizes.vectors() for _ in range(4))

    def record_chunks(of_ends: Any, *results: Any) -> None:
        recorder.launch(
            chunk_adjoint, grid, x.u, x.b, dy, x.refresh, saved.R, saved.D, saved.T, of_ends, *results, direct, W, V, rest,
            saved.chunk_table, sizes.T, sizes.HV, K=sizes.K, BK=sizes.tile(precision), HEADS=sizes.group(x.u),
            HEADS_B=sizes.group(x.b), PRECISION=precision, num_warps=4, num_stages=1,
        )  # fmt: skip

    record_chunks(None, E, N)
    dA = sizes.matrices(sizes.N) if state_grads else None
    large = rounded and chunk_sizes.has_large_shared_memory(device)
    stages = 3 if sizes.PK <= 64 else 2 if large else 1
    recorder.launch(
        carry_adjoint, (sizes.N, sizes.HV), dA_end, E, N, adjoint, dA, x.cu_seqlens, sizes.T, sizes.HV,
        K=sizes.K, PK=sizes.PK, STAGES=stages, PRECISION=precision, num_warps=4 if sizes.PK <= 64 else 8,
        num_stages=1,
    )  # fmt: skip
    record_chunks(adjoint, None, None)
    du = sizes.vectors(sizes.dtype)
    recorder.launch(
        finish_gradients, grid, saved.A, V, rest, du, saved.chunk_table, sizes.T, sizes.HV, K=sizes.K,
        BK=sizes.tile(precision), PRECISION=precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    return RefreshInputs(du, db, None, dA)


# Inputs: RefreshInputs. Outputs: y, A.
REFRESHED = Rule(shapes, forward, backward)
