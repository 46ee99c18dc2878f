"""Linear attention and the delta rules by kernels: the launches of a backward.

`SavedForBackward` holds what the forward keeps; everything else is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..packing import CHUNK
from ..runtime.launch_plan import Recorder
from ..runtime.workspace import TensorSpec
from .channel_decay import chunk_gradients_channel
from .forward import ChunkOperands, Options, join_segments, pass_state, transform_chunks
from .gradients import chunk_gradients
from .key_energy import record_energy_grads
from .output import value_grads
from .precondition import Form, record_precondition_grads
from .reduce import reduce_gate_grads
from .sizes import ChunkSizes, KernelInputs, SavedForBackward
from .state import chunk_state_backward

REDUCE_BLOCK = 1024  # numbers that one program of reduce_gate_grads sums


def backward(
    recorder: Recorder, x: KernelInputs, device: torch.device, options: Options, saved: SavedForBackward,
    output_grads: Sequence[Any], state_grads: bool,
) -> KernelInputs:  # fmt: skip
    """The gradient of every input; those of q, k and the preconditioner's gates per value head."""
    scale, bound, eps = options
    do, dS_end, dA_end = output_grads
    sizes = ChunkSizes(x, device)
    HV, K, V, float32 = sizes.HV, sizes.K, sizes.V, torch.float32
    chunks = transform_chunks(recorder, x, sizes, saved, scale, reuse_saved=True)
    h = pass_state(recorder, sizes, chunks, saved, saved.starts if sizes.segment else x.S, None, reuse_saved=True)

    place = saved.chunk_table, sizes.T
    dv, du = sizes.per_token(HV, V), None
    dP = sizes.per_token(HV, CHUNK)
    shared = {
        "K": K, "V": V, "HEADS_Q": sizes.group(chunks.q), "HEADS_K": sizes.group(chunks.write_key), "DECAY": sizes.decay,
        "PRECISION": sizes.precision,
    }  # fmt: skip

    def through_scores(out: TensorSpec, dh: TensorSpec | None) -> None:
        """P^T dO, or with the states' gradients all of dV; and dP."""
        recorder.launch(
            value_grads, (sizes.M, HV),
            chunks.q, chunks.write_key, chunks.u, do, saved.G, chunks.P, dh, out, dP, None, x.divisor, *place, scale, sizes.H, HV,
            **shared, STATES=dh is not None, FINER=sizes.finer, **sizes.tile_options("value_grads", "BK", "BV"),
        )  # fmt: skip

    if sizes.delta:
        du = sizes.per_token(HV, V, dtype=float32 if sizes.finer else None)
        through_scores(du, None)
    dh, dS = pass_state_back(recorder, x, sizes, chunks, saved, scale, do, du, dS_end, state_grads, shared)
    if not sizes.delta:
        through_scores(dv, dh)

    channel = sizes.decay == 2
    parts = -(-K // sizes.tile["chunk_gradients_channel" if channel else "chunk_gradients"].BK)
    dq, dk = sizes.per_token(HV, K), sizes.per_token(HV, K)
    dw = sizes.per_token(HV, K, dtype=float32 if sizes.finer else None) if sizes.writes else None
    dg = sizes.per_token(HV, K, dtype=float32) if channel else None
    # Of beta and g, partial sums over the key channels.
    gate_grads = sizes.empty(parts, 2, *sizes.rows, HV, dtype=float32)
    stride = prod(gate_grads.shape[1:])
    common = {
        "K": K, "V": V, "HEADS_BETA": sizes.group(x.beta), "HEADS_W": sizes.group(chunks.plain_write_key),
        "WRITE": sizes.writes, "DELTA": sizes.delta, "PRECISION": sizes.precision,
    }  # fmt: skip
    if channel:
        for name in ("chunk_gradients_channel", "chunk_gradients_channel_halves"):
            recorder.launch(
                chunk_gradients_channel, (parts * sizes.M, HV),
                x.q, x.k, chunks.plain_write_key, x.v, x.beta, x.g, chunks.last_gate, chunks.u, du, do, dP, h, dh, *place,
                scale, dq, dk, dw, dv, gate_grads, dg, stride, sizes.H, HV, HEADS_G=sizes.group(x.g),
                FLAT=name == "chunk_gradients_channel", **common, **sizes.tile_options(name, "BK", "BV"),
            )  # fmt: skip
    else:
        recorder.launch(
            chunk_gradients, (parts * sizes.M, HV),
            x.q, x.k, chunks.plain_write_key, x.v, x.beta, saved.G, chunks.u, du, do, dP, h, dh, *place, scale,
            dq, dk, dw, dv, gate_grads, None, x.divisor, stride, sizes.H, HV, DECAY=sizes.decay, PAIRS=True, **common,
            **sizes.tile_options("chunk_gradients", "BK", "BV"),
        )  # fmt: skip
    dprecond_g = dprecond_beta = center_grads = dA = None
    if sizes.precond and dw is not None:
        form = Form("softsign", bound, eps)
        grads = record_precondition_grads(recorder, x, sizes, saved, dw, dk, form, add=True)
        center_grads = grads.parameter
        dprecond_g, dprecond_beta, dA = record_energy_grads(
            recorder, x, sizes, saved, grads, dk, True, dA_end, state_grads
        )
    dbeta, dg_head, dcenter = reduce_grads(recorder, x, sizes, saved, gate_grads, center_grads)
    return KernelInputs(
        dq, dk, dv, dbeta, dg if channel else dg_head, None if x.write_key is None else dw, None if x.S is None else dS,
        dprecond_g, dprecond_beta, dcenter, None if x.A is None else dA,
    )  # fmt: skip


def pass_state_back(
    recorder: Recorder, x: KernelInputs, sizes: ChunkSizes, chunks: ChunkOperands, saved: SavedForBackward, scale: float,
    do: TensorSpec, du: TensorSpec | None, dS_end: TensorSpec | None, state_grads: bool, shared: dict[str, object],
) -> tuple[TensorSpec, TensorSpec | None]:  # fmt: skip
    """The gradients of the states at the chunks' ends [M, HV, K, V], and with state_grads of the initial states. du, the
    gradient of u from inside the chunks, becomes T^T of all of it."""
    HV, K, V, float32 = sizes.HV, sizes.K, sizes.V, torch.float32
    dh = sizes.empty(sizes.M, HV, K, V)
    dS = sizes.empty(sizes.N, HV, K, V, dtype=float32) if state_grads else None
    tile = sizes.tile["chunk_state_backward"]

    def launch(start: TensorSpec | None, end: TensorSpec | None, summary: bool) -> None:
        recorder.launch(
            chunk_state_backward, (-(-V // tile.BV) * sizes.P, HV),
            chunks.q, chunks.write_key, chunks.write_key_rest, chunks.W, x.k if sizes.finer else None, x.divisor, saved.T,
            du, do, saved.G, chunks.last_gate, start, dh, end, sizes.segment_table(saved), sizes.T, scale, sizes.H, HV,
            PK=tile.BK, BV=tile.BV, **shared,
            DELTA=sizes.delta, STARTED=start is not None, ENDED=end is not None, SUMMARY=summary, STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )  # fmt: skip

    if sizes.segment is not None:
        ends = sizes.state(sizes.P)
        launch(None, ends, summary=True)
        join_segments(recorder, x, sizes, ends, saved.transitions, dS_end, back=True)
        dS_end = ends
    launch(dS_end, dS, summary=False)
    return dh, dS


def reduce_grads(
    recorder: Recorder, x: KernelInputs, sizes: ChunkSizes, saved: SavedForBackward, gate_grads: TensorSpec | None,
    center_grads: TensorSpec | None,
) -> tuple[TensorSpec | None, TensorSpec | None, TensorSpec | None]:  # fmt: skip
    """The gradients of beta, of a decay per head and of the centre or ridge, in their shapes and dtypes; see the kernel."""
    parts, *part = (0, 0) if gate_grads is None else gate_grads.shape
    beta = None if gate_grads is None else x.beta
    g = x.g if gate_grads is not None and sizes.decay == 1 else None
    center = None if center_grads is None else x.center
    dbeta, dg, dcenter = (None if y is None else sizes.empty(*y.shape, dtype=y.dtype) for y in (beta, g, center))
    beta_count, g_count = (0 if y is None else prod(y.shape) for y in (beta, g))
    center_count = 0 if center is None else prod(center.shape)
    programs = -(-max(beta_count, g_count) // REDUCE_BLOCK) + center_count
    recorder.launch(
        reduce_gate_grads, (programs,), gate_grads, center_grads, dbeta, dg, dcenter, saved.chunk_table, prod(part), beta_count,
        g_count, sizes.M, center_count, PARTS=parts, HEADS_BETA=sizes.group(beta), HEADS_G=sizes.group(g), BETA=beta is not None,
        G=g is not None, CENTER=center is not None, BLOCK=REDUCE_BLOCK,
    )  # fmt: skip
    return dbeta, dg, dcenter
