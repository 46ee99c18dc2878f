"""What the family computes, and the launches of a forward and a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..chunk.forward import ChunkOperands, pass_state, record_outputs
from ..chunk.gradients import chunk_gradients
from ..chunk.output import value_grads
from ..chunk.sizes import ChunkSizes, KernelInputs, SavedForBackward
from ..chunk.tiles import padded
from ..packing import CHUNK
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .backward import pass_gradients
from .block import BLOCK, key_overlaps
from .forward import write_tokens

PART = 8  # tokens of a block that are unrolled: the time to compile grows with the third power

__all__ = ["OUTPUT_NORMALIZED_TTT", "TTTInputs"]


class TTTInputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V]; gamma [B, T, H or HV]; S [N, HV, K, V] or None; cu_seqlens [N+1] or None, on the
    device."""

    q: Any
    k: Any
    v: Any
    gamma: Any
    S: Any = None
    cu_seqlens: Any = None


class Saved(NamedTuple):
    """In float32 the answers z [BT, HV, V], the factors that follow from their length [BT, HV, 4] and the products of keys
    [BT, H, 16]; what is written [BT, HV, V]; of the linear attention with these values the states at the segments' starts and the
    tables."""

    answers: Any
    factors: Any
    overlaps: Any
    u: Any
    starts: Any
    transitions: Any
    chunk_table: Any
    segment_table: Any


class TTTSizes(ChunkSizes):
    """Those of the linear attention."""

    def __init__(self, x: TTTInputs, device: torch.device) -> None:
        super().__init__(KernelInputs(x.q, x.k, x.v, S=x.S, cu_seqlens=x.cu_seqlens), device)
        PK, PV = padded(self.K), padded(self.V)
        lanes, warps = min(PV, 32), 8 if PK * PV > 8192 else 4
        self.token_constants = {
            "K": self.K, "PK": PK, "V": self.V, "PV": PV, "HEADS_K": self.group(x.k), "HEADS_GAMMA": self.group(x.gamma),
            "LANES": lanes, "COPIES": 32 * warps // lanes, "EACH": PV // lanes, "PART": PART, "PRECISION": self.precision,
            "num_warps": warps, "num_stages": 1,
        }  # fmt: skip

    def placeholders(self) -> Saved:
        kept, float32 = self.saved(), torch.float32
        return Saved(
            self.per_token(self.HV, self.V, dtype=float32), self.per_token(self.HV, 4, dtype=float32),
            self.per_token(self.H, BLOCK.value, dtype=float32), self.per_token(self.HV, self.V),
            kept.starts, kept.transitions, kept.chunk_table, kept.segment_table,
        )  # fmt: skip

    def scratch(self) -> TensorSpec:
        return self.empty(self.N, self.HV, BLOCK.value, self.V, dtype=torch.float32)


def linear_attention(x: TTTInputs, saved: Saved) -> tuple[KernelInputs, SavedForBackward, ChunkOperands]:
    """Its inputs, what it saves, and its operands."""
    kept = SavedForBackward(
        None, None, None, saved.starts, saved.transitions, None, None, saved.chunk_table, saved.segment_table
    )
    inputs = KernelInputs(x.q, x.k, saved.u, S=x.S, cu_seqlens=x.cu_seqlens)
    return inputs, kept, ChunkOperands(x.q, x.k, None, saved.u, x.k)


Results = tuple[tuple[TensorSpec | None, ...], Saved]


def shapes(x: TTTInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    """o and S (None unless `final`), and what a backward needs."""
    sizes = TTTSizes(x, device)
    return (sizes.per_token(sizes.HV, sizes.V), sizes.state(sizes.N) if final else None), sizes.placeholders()


def forward(recorder: Recorder, x: TTTInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    sizes = TTTSizes(x, device)
    (o, S_end), saved = shapes(x, device, options, final)
    linear, kept, chunks = linear_attention(x, saved)
    sizes.record_tables(recorder, linear, kept)
    recorder.launch(
        key_overlaps, (sizes.M * (CHUNK // BLOCK.value), sizes.H), x.k, saved.overlaps, saved.chunk_table, sizes.T, sizes.H,
        K=sizes.K, BK=padded(sizes.K), PRECISION=sizes.precision, num_warps=1,
    )  # fmt: skip
    recorder.launch(
        write_tokens, (sizes.N, sizes.HV),
        x.k, x.v, x.gamma, saved.overlaps, x.S, saved.answers, saved.factors, saved.u, sizes.scratch(), x.cu_seqlens, sizes.T,
        sizes.HV, **sizes.token_constants,
    )  # fmt: skip
    record_outputs(recorder, linear, sizes, chunks, kept, 1.0, o, S_end)
    return (o, S_end), saved


def backward(
    recorder: Recorder, x: TTTInputs, device: torch.device, options: Sequence[Any], saved: Saved,
    output_grads: Sequence[Any], state_grads: bool,
) -> TTTInputs:  # fmt: skip
    sizes = TTTSizes(x, device)
    do, dS_end = output_grads
    HV, K, V, M, float32 = sizes.HV, sizes.K, sizes.V, sizes.M, torch.float32
    _, kept, chunks = linear_attention(x, saved)
    h = pass_state(recorder, sizes, chunks, kept, kept.starts if sizes.segment else x.S, None, reuse_saved=True)
    place, shared = (saved.chunk_table, sizes.T), {"K": K, "V": V, "DECAY": 0, "PRECISION": sizes.precision}
    group = sizes.group(x.k)
    du, dP = sizes.per_token(HV, V, dtype=float32), sizes.per_token(HV, CHUNK)
    recorder.launch(
        value_grads, (M, HV),
        x.q, x.k, saved.u, do, None, None, None, du, dP, None, None, *place, 1.0, sizes.H, HV, HEADS_Q=group, HEADS_K=group,
        **shared, STATES=False, FINER=False, **sizes.tile_options("value_grads", "BK", "BV"),
    )  # fmt: skip

    dz, dv = sizes.per_token(HV, V), sizes.per_token(HV, V)
    dgamma = sizes.per_token(HV, dtype=x.gamma.dtype if x.gamma.shape[2] == HV else float32)
    dh, dS = sizes.empty(M, HV, K, V), sizes.state(sizes.N) if state_grads else None
    recorder.launch(
        pass_gradients, (sizes.N, HV),
        x.q, x.k, x.v, x.gamma, saved.overlaps, do, dS_end, saved.answers, saved.factors, du, dz, dv, dgamma, dh, dS,
        sizes.scratch(), x.cu_seqlens, sizes.T, HV, **sizes.token_constants,
    )  # fmt: skip

    dq, dk = sizes.per_token(HV, K), sizes.per_token(HV, K)
    parts = -(-K // sizes.tile["chunk_gradients"].BK)
    recorder.launch(
        chunk_gradients, (parts * M, HV),
        x.q, x.k, x.k, None, None, None, saved.u, dz, do, dP, h, dh, *place, 1.0, dq, dk, None, None, None, None, None, 0,
        sizes.H, HV, **shared, HEADS_BETA=1, HEADS_W=group, WRITE=False, DELTA=True, PAIRS=True,
        **sizes.tile_options("chunk_gradients", "BK", "BV"),
    )  # fmt: skip
    return TTTInputs(dq, dk, dv, dgamma, None if x.S is None else dS)


# Inputs: TTTInputs. No options. Outputs: o, S.
OUTPUT_NORMALIZED_TTT = Rule(shapes, forward, backward)
