"""What the family computes, and the launches of a forward and a backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..chunk.backward import pass_state_back, reduce_grads
from ..chunk.forward import ChunkOperands, pass_state, record_outputs, transform_chunks
from ..chunk.gradients import chunk_gradients
from ..chunk.output import value_grads
from ..chunk.sizes import ChunkSizes, KernelInputs, SavedForBackward
from ..chunk.tiles import padded
from ..packing import CHUNK
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .gradients import sum_chunks, system_gradients
from .gram import gram_sums, gram_sums_back, scan_states
from .order import stride_between_roots
from .solve import solve_chunk

__all__ = ["RIDGE", "RidgeInputs"]

SCAN_BLOCK = 1024  # numbers of a state that one program takes from chunk to chunk
SCAN_AHEAD = 4  # chunks that it loads at once
TYPICAL_RIDGE = 0.02  # over |H|_F, where a constant ridge leaves that open


class RidgeInputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, H or HV]; beta, mix likewise or None; ridge [HV, K] or None; H [N, HV, K, K]
    and U [N, HV, K, V] or None; cu_seqlens [N+1] or None, on the device."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any = None
    mix: Any = None
    ridge: Any = None
    H: Any = None
    U: Any = None
    cu_seqlens: Any = None


class Options(NamedTuple):
    """ridge: the number, where there is none per channel."""

    ridge: float
    iterations: int
    solver: str
    adaptive_ridge: bool
    scale: float


class Saved(NamedTuple):
    """The solutions x and, with a mix, what the memory is asked, y, [BT, HV, K], in 16 bits as sums of two tensors each; beta k
    or None; H at the chunks' starts over its norm [M, HV, K, K], in float16 unless the inputs are float32, the norm [M, HV], and
    |H_t|_F [BT, HV]; of the memory's linear attention the decays, the states at the segments' starts and the tables."""

    x: Any
    x_rest: Any
    y: Any
    y_rest: Any
    writes: Any
    units: Any
    outsides: Any
    norms: Any
    G: Any
    starts: Any
    transitions: Any
    chunk_table: Any
    segment_table: Any

    @property
    def asked(self) -> tuple[Any, Any]:
        return (self.x, self.x_rest) if self.y is None else (self.y, self.y_rest)


class RidgeSizes(ChunkSizes):
    """Those of the memory's linear attention, which is asked one query per value head."""

    def __init__(self, x: RidgeInputs, device: torch.device) -> None:
        B, T = x.v.shape[:2]
        self.HV, self.key_width = x.v.shape[2], x.k.shape[3]
        query = TensorSpec((B, T, self.HV, self.key_width), x.k.dtype)  # the dtype of the call
        self.memory = KernelInputs(query, x.k, x.v, g=x.g, S=x.U, cu_seqlens=x.cu_seqlens)
        super().__init__(self.memory, device)
        self.constants = {
            "K": self.K, "PK": padded(self.K), "HEADS_K": self.group(x.k), "HEADS_BETA": self.group(x.beta),
            "PRECISION": self.precision,
        }  # fmt: skip
        self.columns = {"BV": min(64, padded(self.K)), "num_warps": 4, "num_stages": 1}
        self.parts = -(-self.K // self.columns["BV"])

    def in_two(self) -> tuple[TensorSpec, TensorSpec | None]:
        rest = None if self.dtype == torch.float32 else self.per_token(self.HV, self.K)
        return self.per_token(self.HV, self.K), rest

    def gram(self, count: int) -> TensorSpec:
        return self.empty(count, self.HV, self.K, self.K, dtype=torch.float32)

    def placeholders(self, x: RidgeInputs, options: Options) -> Saved:
        kept = self.saved()
        (solved, solved_rest), (y, y_rest) = self.in_two(), (None, None) if x.mix is None else self.in_two()
        work = torch.float32 if self.dtype == torch.float32 else torch.float16
        system = (
            None if x.beta is None else self.per_token(self.HV, self.K),
            self.empty(self.M, self.HV, self.K, self.K, dtype=work),
            self.empty(self.M, self.HV, dtype=torch.float32),
            self.per_token(self.HV, dtype=torch.float32) if options.adaptive_ridge else None,
        )
        memory = kept.G, kept.starts, kept.transitions, kept.chunk_table, kept.segment_table
        return Saved(solved, solved_rest, y, y_rest, *system, *memory)


def memory_of(x: RidgeInputs, sizes: RidgeSizes, saved: Saved) -> tuple[Any, Any]:
    """The inputs of the memory's linear attention, and what it saves."""
    keys = x.k if saved.writes is None else saved.writes
    inputs = sizes.memory._replace(q=saved.asked[0], k=keys, write_key=keys)
    kept = SavedForBackward(
        None, None, saved.G, saved.starts, saved.transitions, None, None, saved.chunk_table, saved.segment_table
    )
    return inputs, kept


Results = tuple[tuple[TensorSpec | None, ...], Saved]


def shapes(x: RidgeInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    """o, H and U (None unless `final`), and what a backward needs."""
    sizes = RidgeSizes(x, device)
    H_end, U_end = (sizes.gram(sizes.N), sizes.state(sizes.N)) if final else (None, None)
    return (sizes.per_token(sizes.HV, sizes.V), H_end, U_end), sizes.placeholders(x, Options(*options))


def forward(recorder: Recorder, x: RidgeInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    sizes = RidgeSizes(x, device)
    (o, H_end, U_end), saved = shapes(x, device, options, final)
    memory, kept = memory_of(x, sizes, saved)
    sizes.record_tables(recorder, memory, kept)
    chunks = transform_chunks(recorder, memory, sizes, kept, 1.0, reuse_saved=False)._replace(q_rest=saved.asked[1])
    states = pass_gram(recorder, x, sizes, saved, H_end)
    solve(recorder, x, sizes, Options(*options), saved, states=states)
    record_outputs(recorder, memory, sizes, chunks, kept, 1.0, o, U_end)
    return (o, H_end, U_end), saved


def pass_gram(
    recorder: Recorder, x: RidgeInputs, sizes: RidgeSizes, saved: Saved, end: TensorSpec | None
) -> TensorSpec:  # fmt: skip
    """H at the chunks' starts; fills saved.writes."""
    states = sizes.gram(sizes.M)
    recorder.launch(
        gram_sums, (sizes.parts * sizes.M, sizes.HV),
        x.k, x.beta, saved.G, states, saved.writes, saved.chunk_table, sizes.T, sizes.HV, **sizes.constants, **sizes.columns,
    )  # fmt: skip
    scan(recorder, x, sizes, saved, x.H, states, end, back=False)
    return states


def scan(
    recorder: Recorder, x: RidgeInputs, sizes: RidgeSizes, saved: Saved, begin: Any, states: TensorSpec,
    end: TensorSpec | None, back: bool,
) -> None:  # fmt: skip
    recorder.launch(
        scan_states, (sizes.N, sizes.HV, -(-sizes.K * sizes.K // SCAN_BLOCK)),
        begin, states, saved.G, end, x.cu_seqlens, sizes.T, sizes.HV,
        K=sizes.K, BLOCK=SCAN_BLOCK, AHEAD=SCAN_AHEAD, BACK=back, num_warps=4,
    )  # fmt: skip


def solve(
    recorder: Recorder, x: RidgeInputs, sizes: RidgeSizes, options: Options, saved: Saved, *,
    states: TensorSpec | None = None, dy: TensorSpec | None = None, e: TensorSpec | None = None, slope: TensorSpec | None = None,
    dq: TensorSpec | None = None, dmix: TensorSpec | None = None,
) -> None:  # fmt: skip
    """The solutions, from H at the chunks' starts; with dy, the gradient of what the memory is asked, the adjoint ones."""
    by_chebyshev = options.solver == "chebyshev"
    lowest = options.ridge if options.adaptive_ridge else TYPICAL_RIDGE
    stride = stride_between_roots(options.iterations + 1, lowest) if by_chebyshev else 0
    recorder.launch(
        solve_chunk, (sizes.M, sizes.HV),
        x.q, x.k, x.beta, saved.G, x.mix, x.ridge, states, saved.units, saved.outsides, saved.norms, dy, saved.x, saved.x_rest, e,
        saved.y, saved.y_rest, slope, dq, dmix, saved.chunk_table, sizes.T, options.scale, options.ridge, options.iterations,
        stride, sizes.HV, **sizes.constants,
        HEADS_MIX=sizes.group(x.mix), CHEBYSHEV=by_chebyshev, ADAPTIVE=options.adaptive_ridge,
        BACK=dy is not None, num_warps=4, num_stages=1,
    )  # fmt: skip


def backward(
    recorder: Recorder, x: RidgeInputs, device: torch.device, options: Sequence[Any], saved: Saved,
    output_grads: Sequence[Any], state_grads: bool,
) -> RidgeInputs:  # fmt: skip
    sizes, chosen = RidgeSizes(x, device), Options(*options)
    do, dH_end, dU_end = output_grads
    HV, K, M, float32 = sizes.HV, sizes.K, sizes.M, torch.float32
    _, kept = memory_of(x, sizes, saved)
    dy, d_writes, dv, dP, memory_gates, dU = memory_gradients(recorder, x, sizes, saved, do, dU_end, state_grads)

    e, dq = sizes.per_token(HV, K), sizes.per_token(HV, K)
    slope = sizes.per_token(HV, dtype=float32) if chosen.adaptive_ridge else None
    dmix = gate_gradient(sizes, x.mix)
    solve(recorder, x, sizes, chosen, saved, e=e, dy=dy, slope=slope, dq=dq, dmix=dmix)

    later, dH = sizes.gram(M), sizes.gram(sizes.N) if state_grads else None
    place = saved.chunk_table, sizes.T
    recorder.launch(
        gram_sums_back, (sizes.parts * M, HV),
        x.k, x.beta, saved.G, saved.x, e, slope, saved.units, saved.outsides, later, *place, HV, **sizes.constants,
        ADAPTIVE=chosen.adaptive_ridge, **sizes.columns,
    )  # fmt: skip
    scan(recorder, x, sizes, saved, dH_end, later, dH, back=True)
    dk = sizes.per_token(HV, K)
    per_chunk = None if x.ridge is None else sizes.empty(M, HV, K, dtype=float32)
    system_gates = sizes.empty(sizes.parts, *memory_gates.shape[1:], dtype=float32)
    recorder.launch(
        system_gradients, (sizes.parts * M, HV),
        x.q, x.k, x.beta, saved.G, x.mix, dP, saved.x, saved.x_rest, e, slope, saved.norms, saved.units, saved.outsides, later,
        d_writes, memory_gates, system_gates, dk, per_chunk, *place, chosen.scale, prod(memory_gates.shape[1:]), HV,
        K=K, BK=sizes.columns["BV"], HEADS_K=sizes.group(x.k), HEADS_BETA=sizes.group(x.beta), HEADS_MIX=sizes.group(x.mix),
        MEMORY_PARTS=memory_gates.shape[0], ADAPTIVE=chosen.adaptive_ridge, PRECISION=sizes.precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    dbeta, dg, _ = reduce_grads(recorder, sizes.memory._replace(beta=x.beta), sizes, kept, system_gates, None)
    d_ridge = None
    if per_chunk is not None:
        d_ridge = sizes.empty(*x.ridge.shape, dtype=x.ridge.dtype)
        recorder.launch(
            sum_chunks, (HV,), per_chunk, d_ridge, saved.chunk_table, M, HV, K=K, PK=padded(K), ROWS=16, num_warps=4
        )
    return RidgeInputs(dq, dk, dv, dg, dbeta, dmix, d_ridge, None if x.H is None else dH, None if x.U is None else dU)


def gate_gradient(sizes: RidgeSizes, gate: Any) -> TensorSpec | None:
    """Per value head: in float32 where several of these share one gate."""
    if gate is None:
        return None
    return sizes.per_token(sizes.HV, dtype=gate.dtype if gate.shape[2] == sizes.HV else torch.float32)


def memory_gradients(
    recorder: Recorder, x: RidgeInputs, sizes: RidgeSizes, saved: Saved, do: Any, dU_end: Any,
    state_grads: bool,
) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec | None]:  # fmt: skip
    """The memory's gradients: of what it is asked, in float32, of its keys and values, of its scores, the partial sums of dg, and
    of its first state. Those of keys and dg lack what tokens of the chunk do to each other."""
    memory, kept = memory_of(x, sizes, saved)
    HV, K, V, M = sizes.HV, sizes.K, sizes.V, sizes.M
    keys = memory.k
    chunks = ChunkOperands(saved.asked[0], keys, None, x.v, keys)
    h = pass_state(recorder, sizes, chunks, kept, kept.starts if sizes.segment else x.U, None, reuse_saved=True)
    shared = {
        "K": K, "V": V, "HEADS_Q": 1, "HEADS_K": sizes.group(keys), "DECAY": 1, "PRECISION": sizes.precision,
    }  # fmt: skip
    dh, dU = pass_state_back(recorder, memory, sizes, chunks, kept, 1.0, do, None, dU_end, state_grads, shared)
    place = saved.chunk_table, sizes.T
    dv, dP = sizes.per_token(HV, V), sizes.per_token(HV, CHUNK)
    recorder.launch(
        value_grads, (M, HV),
        chunks.q, keys, x.v, do, saved.G, None, dh, dv, dP, saved.asked[1], None, *place, 1.0, HV, HV,
        **shared, STATES=True, FINER=False, **sizes.tile_options("value_grads", "BK", "BV"),
    )  # fmt: skip
    parts = -(-K // sizes.tile["chunk_gradients"].BK)
    # In float32, as what the systems add to dk cancels most of it: the better the memory, the more.
    dy, d_writes = (sizes.per_token(HV, K, dtype=torch.float32) for _ in range(2))
    gate_grads = sizes.empty(parts, 2, *sizes.rows, HV, dtype=torch.float32)
    recorder.launch(
        chunk_gradients, (parts * M, HV),
        chunks.q, keys, keys, None, None, saved.G, x.v, None, do, dP, h, dh, *place, 1.0, dy, None, d_writes, None,
        gate_grads, saved.asked[1], None,
        prod(gate_grads.shape[1:]), HV, HV, K=K, V=V, HEADS_BETA=1, HEADS_W=sizes.group(keys), WRITE=True, DELTA=False,
        DECAY=1, PAIRS=False, PRECISION=sizes.precision, **sizes.tile_options("chunk_gradients", "BK", "BV"),
    )  # fmt: skip
    return dy, d_writes, dv, dP, gate_grads, dU


# Inputs: RidgeInputs. Outputs: o, H, U.
RIDGE = Rule(shapes, forward, backward)
