"""The launches of the memory of variational linear attention: the delta rule along unit directions, its answers divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..chunk.backward import backward as delta_rule_backward
from ..chunk.forward import record_outputs, transform_chunks
from ..chunk.forward import shapes as delta_rule_shapes
from ..chunk.sizes import ChunkSizes, KernelInputs, SavedForBackward
from ..chunk.tiles import padded
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .unit_keys import divisor_gradients, divisors, scan_rows, unit_key_gradients, unit_keys

__all__ = ["PENALIZED", "PenalizedInputs"]

DELTA_RULE = (1.0, 1.5, 1e-6)  # the scale of q; a preconditioner's bound and eps, without effect


class PenalizedInputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V]; y [B, T, h, K] in float32, A_t k_t; S [N, HV, K, V] or None; z [N, HV, K] or None;
    cu_seqlens [N+1] or None, on the device."""

    q: Any
    k: Any
    v: Any
    y: Any
    S: Any = None
    z: Any = None
    cu_seqlens: Any = None


class Saved(NamedTuple):
    """What the delta rule keeps, the sums of the keys at the chunks' starts [M, HV, K] and the divisors [BT, HV], these in
    float32."""

    T: Any
    u: Any
    G: Any
    starts: Any
    transitions: Any
    key_energy: Any
    write_keys: Any
    chunk_table: Any
    segment_table: Any
    z: Any
    divisor: Any


class Call:
    """The sizes of a call, and the delta rule's inputs as placeholders. Operands are in the dtype of the inputs. Where that
    has 16 bits, another tensor has what the rounding of write keys left."""

    def __init__(self, x: PenalizedInputs, device: torch.device, options: Sequence[Any]) -> None:
        self.x, self.device = x, device
        self.eps, self.unit_keys, self.unit_writes = options
        B, T, self.HV, self.V = x.v.shape
        self.K = x.k.shape[3]
        self.heads, self.heads_y = self.HV // x.k.shape[2], self.HV // x.y.shape[2]
        dtype = x.k.dtype
        writes = TensorSpec(x.y.shape, dtype)
        self.memory = KernelInputs(
            x.q, TensorSpec(x.k.shape, dtype) if self.unit_keys else x.k, x.v, TensorSpec((B, T, 1), torch.float32),
            write_key=writes, S=x.S, cu_seqlens=x.cu_seqlens,
            write_key_rest=None if dtype == torch.float32 else TensorSpec(x.y.shape, dtype),
        )  # fmt: skip
        self.sizes = ChunkSizes(self.memory, device)
        self.channels = {"K": self.K, "PK": padded(self.K)}
        self.units = {"UNIT_KEYS": self.unit_keys, "UNIT_WRITES": self.unit_writes}

    def kept(self, saved: Saved) -> SavedForBackward:
        """What the delta rule keeps."""
        return SavedForBackward(*saved[: len(SavedForBackward._fields)])

    def per_chunk(self) -> TensorSpec:
        return TensorSpec((self.sizes.M, self.HV, self.K), torch.float32)

    def state(self) -> TensorSpec:
        return TensorSpec((self.sizes.N, self.HV, self.K), torch.float32)

    def record(self, recorder: Recorder, saved: Any, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """A kernel that takes a chunk of one head per program."""
        recorder.launch(
            kernel, (self.sizes.M, self.HV), *arguments, saved.chunk_table, self.sizes.T, self.HV, **constants,
            num_warps=4 if padded(max(self.K, self.V)) <= 64 else 8, num_stages=1,
        )  # fmt: skip

    def record_unit_keys(self, recorder: Recorder, saved: Any, sums: TensorSpec | None) -> None:
        x, memory = self.x, self.memory
        self.record(
            recorder, saved, unit_keys, x.k, x.y, memory.k if self.unit_keys else None, memory.write_key, memory.write_key_rest,
            memory.beta, sums, **self.channels, HEADS_K=self.heads, HEADS_Y=self.heads_y, **self.units,
        )  # fmt: skip

    def record_scan(self, recorder: Recorder, start: Any, sums: TensorSpec, states: Any, end: Any, back: bool) -> None:
        recorder.launch(
            scan_rows, (self.sizes.N, self.HV), start, sums, states, end, self.x.cu_seqlens, self.sizes.T, self.HV,
            **self.channels, BACK=back, num_warps=4, num_stages=1,
        )  # fmt: skip


Results = tuple[tuple[TensorSpec | None, ...], Saved]


def shapes(x: PenalizedInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    """o, S and z (None unless `final`), and what a backward needs."""
    call = Call(x, device, options)
    (o, S, _), kept = delta_rule_shapes(call.memory, device, DELTA_RULE, final)
    saved = Saved(*kept, call.per_chunk(), call.sizes.per_token(call.HV, dtype=torch.float32))
    return (o, S, call.state() if final else None), saved


def forward(
    recorder: Recorder, x: PenalizedInputs, device: torch.device, options: Sequence[Any], final: bool
) -> Results:  # fmt: skip
    call = Call(x, device, options)
    (o, S, z), saved = shapes(x, device, options, final)
    sizes, kept, sums = call.sizes, call.kept(saved), call.per_chunk()
    sizes.record_tables(recorder, call.memory, kept)
    call.record_unit_keys(recorder, saved, sums)
    call.record_scan(recorder, x.z, sums, saved.z, z, back=False)
    call.record(
        recorder, saved, divisors, x.q, x.k, saved.z, saved.divisor, call.eps, **call.channels, HEADS=call.heads
    )
    memory = call.memory._replace(divisor=saved.divisor)
    chunks = transform_chunks(recorder, memory, sizes, kept, DELTA_RULE[0], reuse_saved=False)
    record_outputs(recorder, memory, sizes, chunks, kept, DELTA_RULE[0], o, S)
    return (o, S, z), saved


def backward(
    recorder: Recorder, x: PenalizedInputs, device: torch.device, options: Sequence[Any], saved: Saved,
    output_grads: Sequence[Any], state_grads: bool,
) -> PenalizedInputs:  # fmt: skip
    call = Call(x, device, options)
    do, dS_end, dz_end = output_grads
    sizes, float32 = call.sizes, torch.float32
    call.record_unit_keys(recorder, saved, None)
    memory = call.memory._replace(divisor=saved.divisor)
    found = delta_rule_backward(recorder, memory, device, DELTA_RULE, call.kept(saved), (do, dS_end, None), state_grads)
    ddivisor, sums, later = sizes.per_token(call.HV, dtype=float32), call.per_chunk(), call.per_chunk()
    heads = {**call.channels, "HEADS": call.heads}
    call.record(recorder, saved, divisor_gradients, x.q, found.q, saved.divisor, ddivisor, sums, call.eps, **heads)
    dz = call.state() if state_grads and x.z is not None else None
    call.record_scan(recorder, dz_end, sums, later, dz, back=True)
    dq, dk, dy = (sizes.per_token(call.HV, call.K, dtype=dtype) for dtype in (sizes.dtype, sizes.dtype, float32))
    call.record(
        recorder, saved, unit_key_gradients, x.q, x.k, x.y, saved.z, later, ddivisor, found.q, found.k, found.write_key, dq, dk,
        dy, **heads, HEADS_Y=call.heads_y, **call.units,
    )  # fmt: skip
    return PenalizedInputs(dq, dk, found.v, dy, found.S, dz)


# Inputs: PenalizedInputs. Options: eps, whether keys and write keys have length 1. Outputs: o, S, z.
PENALIZED = Rule(shapes, forward, backward)
