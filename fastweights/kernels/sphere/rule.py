"""What the family computes, and the launches of a forward and a backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from ..chunk.backward import REDUCE_BLOCK
from ..chunk.reduce import reduce_gate_grads
from ..chunk.sizes import CallSizes, max_pieces
from ..chunk.tiles import padded
from ..packing import record_tables
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .backward import FEW, pass_tokens_back
from .decode_steps import decode_tokens
from .decode_steps_back import decode_tokens_back
from .forward import EVERY, pass_tokens, slots_of
from .slot_gradients import slot_gradients
from .slot_outputs import read_slots
from .slot_outputs_back import prepare_turns_back
from .slot_turns import BLOCK, inner_products, turn_slots
from .slot_turns_back import turn_slots_back

__all__ = ["SPHERE", "SphereInputs"]

WIDEST = 128  # of K and V: the state of a head is held in registers


class SphereInputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V]; gamma, decay [B, T, H or HV], decay may be None; S [N, HV, K, V] or None; cu_seqlens
    [N+1] or None, on the device."""

    q: Any
    k: Any
    v: Any
    gamma: Any
    decay: Any = None
    S: Any = None
    cu_seqlens: Any = None


class Saved(NamedTuple):
    """Of every token f, w and b of its step and, where slots are free in length, their length [BT, HV, K]; what the memory
    answers (for decode its error) [BT, HV, V]; every 16th state [M, HV, K, V]. All float32, None where a rule lacks one.

    Where tokens are taken by chunks: b [M, HV, K, 16], 0 past the last token, from which f and w are found again; the states and
    what tokens of a chunk read of each other [M, HV, 16, 16] in the inputs' dtype; 1 / n^2 of the first step [N, HV, K]; the
    square of the largest coefficient of every tile of slots [N, HV, tiles]."""

    kept: Any
    turned: Any
    along: Any
    lengths: Any
    answers: Any
    states: Any
    scores: Any = None
    first_per_square: Any = None
    grown: Any = None
    steep: Any = None


@lru_cache
def tile(K: int, V: int, slots: int = 4) -> dict[str, int]:
    """The layout of a tile (see layout.py) and its warps: a thread holds `slots` slots, 4 or 8, of 4, 8 or 16 value channels."""
    each = min(slots, padded(K) // 4)
    warps = padded(K) // (4 * each)
    return {"LV": 8, "LK": 4, "W": warps, "RK": each, "GV": padded(V, 32) // 32, "RV": 4, "num_warps": warps}


class SphereSizes(CallSizes):
    """M kept states, one per 16 tokens, or as many numbers as those of packed sequences may take."""

    def __init__(self, x: SphereInputs, objective: str, normalize: bool) -> None:
        super().__init__(x)
        self.M = max_pieces(self.N, self.T, EVERY.value, self.packed)
        self.objective, self.free = objective, not normalize
        self.by_chunks = normalize and objective in ("encode", "similarity")
        self.decodes = normalize and objective == "decode"
        self.tiles = -(-self.K // slots_of(self.K))
        self.constants: dict[str, Any] = {
            "K": self.K, "V": self.V, "OBJECTIVE": objective, "NORMALIZE": normalize, "HEADS_K": self.group(x.q),
            "HEADS_GAMMA": self.group(x.gamma), "HEADS_DECAY": self.group(x.decay),
        }  # fmt: skip

    @property
    def of_heads(self) -> dict[str, int]:
        return {name: self.constants[name] for name in ("K", "V", "HEADS_K", "HEADS_GAMMA", "HEADS_DECAY")}

    def vectors(self, width: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        """One per token and value head."""
        return self.per_token(self.HV, width, dtype=dtype)

    @property
    def decode_tile(self) -> dict[str, int]:
        """Of the forward of the decode objective: half of the warps that its backward needs."""
        return tile(self.K, self.V, 8)

    def steps(self) -> TensorSpec:
        """One number per token and slot; by chunks those of a slot's 16 tokens are neighbours."""
        if self.by_chunks:
            return self.empty(self.M, self.HV, self.K, EVERY.value, dtype=torch.float32)
        return self.vectors(self.K)

    def saved(self) -> Saved:
        f, w = (None, None) if self.by_chunks else (self.steps(), self.steps())
        lengths = self.vectors(self.K) if self.free else None
        errors = self.vectors(self.V) if self.objective == "decode" else None
        scores = first_per_square = grown = steep = None
        if self.by_chunks:
            scores = self.empty(self.M, self.HV, EVERY.value, EVERY.value)
            first_per_square = self.empty(self.N, self.HV, self.K, dtype=torch.float32)
            grown = self.empty(self.N, self.HV, self.tiles, dtype=torch.float32)
        if self.decodes:
            steep = self.empty(self.M, self.HV, self.decode_tile["W"], dtype=torch.int32)
        states = self.state(self.M, self.dtype if self.by_chunks else torch.float32)
        return Saved(f, w, self.steps(), lengths, errors, states, scores, first_per_square, grown, steep)

    def record_blocks(self, recorder: Recorder, x: SphereInputs) -> TensorSpec | None:
        """The table that the place of 16 tokens is read from, where it does not follow from their number."""
        if not self.packed:
            return None
        blocks = self.empty(self.M, 5, dtype=torch.int32)
        record_tables(recorder, x.cu_seqlens, None, blocks, self.T, EVERY.value)
        return blocks


Results = tuple[tuple[TensorSpec | None, ...], Saved]


def shapes(x: SphereInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    """o and S (None unless `final`), and what a backward needs."""
    sizes = SphereSizes(x, *options)
    return (sizes.vectors(sizes.V, dtype=sizes.dtype), sizes.state(sizes.N) if final else None), sizes.saved()


def forward(recorder: Recorder, x: SphereInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    sizes = SphereSizes(x, *options)
    (o, S), saved = shapes(x, device, options, final)
    steps = saved
    if sizes.by_chunks:
        steps = saved._replace(kept=sizes.steps(), turned=sizes.steps())
        forward_by_chunks(recorder, x, sizes, o, S, steps)
    if sizes.decodes:
        forward_decoding(recorder, x, sizes, o, S, saved)
        return (o, S), saved
    recorder.launch(
        pass_tokens, (sizes.N, sizes.HV),
        x.q, x.k, x.v, x.gamma, x.decay, x.S, o, *steps[:6], S, saved.grown, x.cu_seqlens, sizes.T, sizes.HV, **sizes.constants,
        **tile(sizes.K, sizes.V),
    )  # fmt: skip
    return (o, S), saved


def forward_by_chunks(recorder: Recorder, x: SphereInputs, sizes: SphereSizes, o: Any, S: Any, saved: Saved) -> None:
    """The slots of a chunk as coefficients."""
    blocks = sizes.record_blocks(recorder, x)
    gram = sizes.empty(sizes.M, sizes.HV, EVERY.value, BLOCK.value, dtype=torch.float32)
    widths = {"HV": sizes.HV, "K": sizes.K, "V": sizes.V}
    BV = padded(sizes.V, 64)  # wider than a tile of slots, whose layout Triton would take from the values otherwise
    of_heads = {name: sizes.constants[name] for name in ("HEADS_K", "HEADS_GAMMA", "HEADS_DECAY")}
    grid = sizes.M, sizes.HV
    recorder.launch(
        inner_products, grid,
        x.v, gram, blocks, sizes.T, HV=sizes.HV, V=sizes.V, BV=BV, PRECISION=sizes.precision, num_warps=1,
    )  # fmt: skip
    recorder.launch(
        turn_slots, (sizes.N, sizes.HV, sizes.tiles),
        x.k, x.v, x.gamma, x.decay, x.S, gram, saved.kept, saved.turned, saved.along, saved.states,
        saved.first_per_square, S, saved.grown, x.cu_seqlens,
        sizes.T, **widths, BV=BV, OBJECTIVE=sizes.objective, **of_heads, SLOTS=slots_of(sizes.K),
        num_warps=4 if sizes.K <= 64 else 8, num_stages=1,
    )  # fmt: skip
    recorder.launch(
        read_slots, grid, x.q, x.v, saved.kept, saved.turned, saved.states, o, saved.scores, blocks, sizes.T, **widths,
        BV=BV, HEADS_K=of_heads["HEADS_K"], BY_CHUNKS=True, PRECISION=sizes.precision, num_warps=1, num_stages=1,
    )  # fmt: skip


def forward_decoding(recorder: Recorder, x: SphereInputs, sizes: SphereSizes, o: Any, S: Any, saved: Saved) -> None:
    """Token after token, then the outputs of all blocks."""
    recorder.launch(
        decode_tokens, (sizes.N, sizes.HV),
        x.k, x.v, x.gamma, x.decay, x.S, saved.kept, saved.turned, saved.along, saved.answers, saved.states, S, saved.steep,
        x.cu_seqlens, sizes.T, sizes.HV, **sizes.of_heads, **sizes.decode_tile,
    )  # fmt: skip
    recorder.launch(
        read_slots, (sizes.M, sizes.HV), x.q, saved.answers, saved.kept, saved.turned, saved.states, o, None,
        sizes.record_blocks(recorder, x), sizes.T, HV=sizes.HV, K=sizes.K, V=sizes.V, BV=padded(sizes.V, 64),
        HEADS_K=sizes.constants["HEADS_K"], BY_CHUNKS=False, PRECISION=sizes.precision, num_warps=1, num_stages=1,
    )  # fmt: skip


def backward(
    recorder: Recorder, x: SphereInputs, device: torch.device, options: Sequence[Any], saved: Saved,
    output_grads: Sequence[Any], state_grads: bool,
) -> SphereInputs:  # fmt: skip
    sizes = SphereSizes(x, *options)
    do, d_end = output_grads
    dq, dk = (sizes.vectors(sizes.K, dtype=sizes.dtype) for _ in range(2))
    dv = sizes.vectors(sizes.V, dtype=sizes.dtype)
    dgamma, ddecay = (None if gate is None else TensorSpec(gate.shape, gate.dtype) for gate in (x.gamma, x.decay))
    dS = sizes.state(sizes.N) if state_grads else None
    layout = tile(sizes.K, sizes.V)
    parts = TensorSpec((layout["W"], 2, *sizes.rows, sizes.HV), torch.float32)
    gates = sizes.B * sizes.T * sizes.HV
    steps = saved
    if sizes.by_chunks:
        kept, turned = backward_by_chunks(recorder, x, sizes, saved, do, d_end, dq, dk, dv, parts, dS)
        steps = saved._replace(kept=kept, turned=turned)
    if sizes.decodes:
        recorder.launch(
            decode_tokens_back, (sizes.N, sizes.HV),
            x.q, x.k, x.gamma, x.decay, x.S, do, d_end, saved.kept, saved.turned, saved.along, saved.answers, saved.states,
            dq, dk, dv, parts, gates, dS, saved.steep, x.cu_seqlens, sizes.T, sizes.HV, **sizes.of_heads, **layout,
            FLAGS=sizes.decode_tile["W"],
        )  # fmt: skip
    else:
        scratch = sizes.state(sizes.N * (EVERY.value // FEW.value))
        recorder.launch(
            pass_tokens_back, (sizes.N, sizes.HV),
            x.q, x.k, x.v, x.gamma, x.decay, x.S, do, d_end, *steps[:6], scratch, dq, dk, dv, parts, gates, dS,
            saved.grown, x.cu_seqlens, sizes.T, sizes.HV, **sizes.constants, **layout,
        )  # fmt: skip
    counts = [0 if gate is None else prod(gate.shape) for gate in (x.gamma, x.decay)]
    recorder.launch(
        reduce_gate_grads, (-(-max(counts) // REDUCE_BLOCK),), parts, None, dgamma, ddecay, None, None, 2 * gates, *counts, 0,
        sizes.HV, PARTS=parts.shape[0], HEADS_BETA=sizes.constants["HEADS_GAMMA"], HEADS_G=sizes.constants["HEADS_DECAY"],
        BETA=True, G=x.decay is not None, CENTER=False, BLOCK=REDUCE_BLOCK,
    )  # fmt: skip
    return SphereInputs(dq, dk, dv, dgamma, ddecay, None if x.S is None else dS)


def backward_by_chunks(
    recorder: Recorder, x: SphereInputs, sizes: SphereSizes, saved: Saved, do: Any, d_end: Any, dq: Any, dk: Any, dv: Any,
    parts: Any, dS: Any,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    """The gradients in the slots of a chunk by their products with what lies before. Returns two tensors [M, HV, K, 16] that
    nothing reads afterwards: memory for f and w where the pass from token to token takes over."""
    blocks = sizes.record_blocks(recorder, x)
    pairs = sizes.empty(sizes.M, sizes.HV, EVERY.value, sizes.K + EVERY.value, dtype=torch.float32)
    reads = sizes.empty(sizes.M, sizes.HV, EVERY.value, EVERY.value, dtype=torch.float32)
    gates = sizes.empty(sizes.M, sizes.HV, 2, EVERY.value, dtype=torch.float32)
    A, D, adjoints = sizes.steps(), sizes.steps(), sizes.state(sizes.M, sizes.dtype)
    options = {
        **{name: sizes.constants[name] for name in ("K", "V", "HEADS_K", "HEADS_GAMMA", "HEADS_DECAY")},
        "HV": sizes.HV, "BV": padded(sizes.V, 64), "OBJECTIVE": sizes.objective, "PRECISION": sizes.precision,
    }  # fmt: skip
    inputs = x.k, x.v, x.gamma, x.decay
    recorder.launch(
        prepare_turns_back, (sizes.M, sizes.HV),
        x.q, *inputs, do, saved.along, saved.first_per_square, saved.states, pairs, reads, gates, A, D, dq, blocks, sizes.T,
        **options, num_warps=1, num_stages=1,
        maxnreg=168 if sizes.dtype.itemsize == 2 else None,  # so that a multiprocessor runs 12 programs, not 8
    )  # fmt: skip
    slots = 16 if sizes.K <= 64 else 32  # of a program; with 32 of them its registers hold less ahead
    recorder.launch(
        turn_slots_back, (sizes.N, sizes.HV, -(-sizes.K // slots)),
        x.q, *inputs, do, d_end, saved.along, saved.first_per_square, A, D, pairs, saved.states, adjoints, dS, x.cu_seqlens,
        sizes.T, **options, SLOTS=slots, PAIRS_AHEAD=slots == 16, num_warps=slots // 2, num_stages=1,
    )  # fmt: skip
    recorder.launch(
        slot_gradients, (sizes.M, sizes.HV),
        *inputs, do, saved.along, saved.states, saved.first_per_square, pairs, saved.scores, A, D, adjoints, dk, dv, parts,
        sizes.B * sizes.T * sizes.HV, dS, blocks, sizes.T, PARTS=parts.shape[0], **options, num_warps=1, num_stages=1,
    )  # fmt: skip
    return A, D


# Inputs: SphereInputs. Options: objective ("decode", "encode" or "similarity") and normalize. Outputs: o, S.
SPHERE = Rule(shapes, forward, backward)
