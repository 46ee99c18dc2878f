"""What the family computes, and the launches of a forward and a backward."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ..common.call import Call, Specs, make_rule, max_pieces, padded
from ..common.packing import record_tables
from ..runtime.gluon import runs_gluon
from ..runtime.workspace import TensorSpec
from .backward import pass_tokens_back
from .decode_steps import decode_tokens, decode_tokens_back
from .forward import EVERY, FEW, pass_tokens, slots_per_program
from .slot_gradients import slot_gradients
from .slot_outputs import read_slots
from .slot_outputs_back import prepare_turns_back
from .slot_turns import BLOCK, inner_products, turn_slots
from .slot_turns_back import turn_slots_back

WIDEST = 128  # of K and V: the state of a head is held in registers


class SphereInputs(namedtuple("SphereInputs", "q k v gamma decay S cu_seqlens", defaults=(None, None, None))):
    """q, k [B, T, H, K]; v [B, T, HV, V]; gamma, decay [B, T, H or HV], decay may be None; S [N, HV, K, V] or None; cu_seqlens
    [N+1] or None, on the device."""


class Saved(
    namedtuple(
        "Saved",
        "kept turned along lengths answers states scores first_per_square grown steep",
        defaults=(None, None, None, None),
    )
):
    """Of every token f, w and b of its step and, where slots are free in length, their length [BT, HV, K]; what the memory
    answers (for decode its error) [BT, HV, V]; every 16th state [M, HV, K, V]. All float32, None where a rule lacks one.

    Where tokens are taken by chunks: b [M, HV, K, 16], 0 past the last token, from which f and w are found again; the states and
    what tokens of a chunk read of each other [M, HV, 16, 16] in the inputs' dtype; 1 / n^2 of the first step [N, HV, K]; the
    square of the largest coefficient of every tile of slots [N, HV, tiles]."""


@lru_cache
def tile(K: int, V: int, slots: int = 4) -> dict[str, int]:
    """The layout of a tile (see layout.py) and its warps: a thread holds `slots` slots, 4 or 8, of 4, 8 or 16 value channels."""
    each = min(slots, padded(K) // 4)
    warps = padded(K) // (4 * each)
    return {"LV": 8, "LK": 4, "W": warps, "RK": each, "GV": padded(V, 32) // 32, "RV": 4, "num_warps": warps}


class Sphere(Call):
    """M kept states, one per 16 tokens, or as many numbers as those of packed sequences may take. Options: objective ("decode",
    "encode" or "similarity") and normalize. Outputs: o, S (None unless it is wanted)."""

    def set_up(self) -> None:
        x, (objective, normalize) = self.x, self.options
        self.M = max_pieces(self.N, self.T, EVERY.value, self.packed)
        self.objective, self.free = objective, not normalize
        self.by_chunks = normalize and objective in ("encode", "similarity")
        self.decodes = normalize and objective == "decode"
        self.tiles = -(-self.K // slots_per_program(self.K))
        self.layout = tile(self.K, self.V)
        # Of the forward of the decode objective: half of the warps that its backward needs.
        self.decode_layout = tile(self.K, self.V, 8)
        # BV is wider than a tile of slots, whose layout Triton would take from the values otherwise.
        self.constants |= {
            "HEADS_K": self.group(x.q), "HEADS_GAMMA": self.group(x.gamma), "HEADS_DECAY": self.group(x.decay), "HV": self.HV,
            "BV": padded(self.V, 64), "OBJECTIVE": objective, "NORMALIZE": normalize,
        }  # fmt: skip

    @property
    def turns_in_gluon(self) -> bool:
        """Whether the kernel for Hopper GPUs goes forward from chunk to chunk."""
        sized = self.K == self.V and self.K in (64, 128) and self.dtype.itemsize == 2
        return self.by_chunks and sized and runs_gluon(self.device)

    @property
    def turns_back_in_gluon(self) -> bool:
        """Whether such a kernel goes back; with 64 channels the one in plain Triton is as fast or faster."""
        return self.turns_in_gluon and self.K == 128

    def vectors(self, width: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        """One per token and value head."""
        return self.token_tensor(self.HV, width, dtype=dtype)

    def steps(self) -> TensorSpec:
        """One number per token and slot; by chunks those of a slot's 16 tokens are neighbours."""
        return self.floats(self.M, self.HV, self.K, EVERY.value) if self.by_chunks else self.vectors(self.K)

    def pairs(self, dtype: torch.dtype | None = None) -> TensorSpec:
        """One number for every two of 16 tokens."""
        return self.empty(self.M, self.HV, EVERY.value, EVERY.value, dtype=dtype)

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        f, w = (None, None) if self.by_chunks else (self.steps(), self.steps())
        saved = Saved(
            f, w, self.steps(), self.vectors(self.K) if self.free else None,
            self.vectors(self.V) if self.objective == "decode" else None,
            self.state(self.M, self.dtype if self.by_chunks else torch.float32),
        )  # fmt: skip
        if self.by_chunks:
            first, grown = self.floats(self.N, self.HV, self.K), self.floats(self.N, self.HV, self.tiles)
            saved = saved._replace(scores=self.pairs(), first_per_square=first, grown=grown)
        if self.decodes:
            saved = saved._replace(steep=self.empty(self.M, self.HV, self.decode_layout["W"], dtype=torch.int32))
        return (self.vectors(self.V, dtype=self.dtype), self.state(self.N) if final else None), saved

    def record_blocks(self) -> TensorSpec | None:
        """The table that the place of 16 tokens is read from, where it does not follow from their number."""
        if not self.packed:
            return None
        blocks = self.empty(self.M, 5, dtype=torch.int32)
        record_tables(self.recorder, self.x.cu_seqlens, None, blocks, self.T, EVERY.value)
        return blocks

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x = self.x
        (o, S), saved = self.shapes(final)
        if self.decodes:
            self.forward_decoding(o, S, saved)
            return (o, S), saved
        steps = saved
        if self.by_chunks:
            steps = saved._replace(kept=self.steps(), turned=self.steps())
            self.forward_by_chunks(o, S, steps)
        self.launch(
            pass_tokens, (self.N, self.HV), x.q, x.k, x.v, x.gamma, x.decay, x.S, o, *steps[:6], S, saved.grown, x.cu_seqlens,
            self.T, self.HV, **self.layout,
        )  # fmt: skip
        return (o, S), saved

    def read_outputs(self, h: Any, o: Any, saved: Saved, blocks: Any) -> None:
        """The outputs of all blocks once their steps are known."""
        self.launch(
            read_slots, (self.M, self.HV), self.x.q, h, saved.kept, saved.turned, saved.states, o, saved.scores, blocks, self.T,
            BY_CHUNKS=self.by_chunks, num_warps=1, num_stages=1,
        )  # fmt: skip

    def forward_by_chunks(self, o: Any, S: Any, saved: Saved) -> None:
        """The slots of a chunk as coefficients."""
        x, blocks = self.x, self.record_blocks()
        gram = self.floats(self.M, self.HV, EVERY.value, BLOCK.value)
        self.launch(inner_products, (self.M, self.HV), x.v, gram, blocks, self.T, num_warps=1)
        tensors = (
            x.k, x.v, x.gamma, x.decay, x.S, gram, saved.kept, saved.turned, saved.along, saved.states, saved.first_per_square,
            S, saved.grown, x.cu_seqlens,
        )  # fmt: skip
        if self.turns_in_gluon:
            from .turns_on_hopper import slots_in_turn  # needs Gluon

            warps = self.K // 32  # 8 slots each; as many programs for both sizes
            self.launch(slots_in_turn, (self.N, self.HV, 4), *tensors, self.T, num_warps=warps)
        else:
            self.launch(
                turn_slots, (self.N, self.HV, self.tiles), *tensors, self.T, SLOTS=slots_per_program(self.K),
                num_warps=4 if self.K <= 64 else 8, num_stages=1,
            )  # fmt: skip
        self.read_outputs(x.v, o, saved, blocks)

    def forward_decoding(self, o: Any, S: Any, saved: Saved) -> None:
        """Token after token, then the outputs of all blocks."""
        x = self.x
        self.launch(
            decode_tokens, (self.N, self.HV), x.k, x.v, x.gamma, x.decay, x.S, saved.kept, saved.turned, saved.along,
            saved.answers, saved.states, S, saved.steep, x.cu_seqlens, self.T, self.HV, **self.decode_layout,
        )  # fmt: skip
        self.read_outputs(saved.answers, o, saved, self.record_blocks())

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> SphereInputs:
        x, (do, d_end) = self.x, output_grads
        dq, dk, dv = (self.vectors(width, dtype=self.dtype) for width in (self.K, self.K, self.V))
        dgamma, ddecay = (None if gate is None else TensorSpec(gate.shape, gate.dtype) for gate in (x.gamma, x.decay))
        dS = self.state(self.N) if state_grads else None
        parts = self.floats(self.layout["W"], 2, *self.rows, self.HV)
        gates = self.B * self.T * self.HV
        if self.decodes:
            self.launch(
                decode_tokens_back, (self.N, self.HV), x.q, x.k, x.gamma, x.decay, x.S, do, d_end, saved.kept, saved.turned,
                saved.along, saved.answers, saved.states, dq, dk, dv, parts, gates, dS, saved.steep, x.cu_seqlens, self.T,
                self.HV, **self.layout, FLAGS=self.decode_layout["W"],
            )  # fmt: skip
        else:
            steps = saved
            if self.by_chunks:
                kept, turned = self.backward_by_chunks(saved, do, d_end, dq, dk, dv, parts, dS)
                steps = saved._replace(kept=kept, turned=turned)
            scratch = self.state(self.N * (EVERY.value // FEW.value))
            self.launch(
                pass_tokens_back, (self.N, self.HV), x.q, x.k, x.v, x.gamma, x.decay, x.S, do, d_end, *steps[:6], scratch, dq,
                dk, dv, parts, gates, dS, saved.grown, x.cu_seqlens, self.T, self.HV, **self.layout,
            )  # fmt: skip
        self.sum_gates(parts, None, (dgamma, ddecay, None), None)
        return SphereInputs(dq, dk, dv, dgamma, ddecay, None if x.S is None else dS)

    def backward_by_chunks(
        self, saved: Saved, do: Any, d_end: Any, dq: Any, dk: Any, dv: Any, parts: TensorSpec, dS: Any
    ) -> tuple[TensorSpec, TensorSpec]:
        """The gradients in the slots of a chunk by their products with what lies before. Returns two tensors [M, HV, K, 16] that
        nothing reads afterwards: memory for f and w where the pass from token to token takes over."""
        x, blocks = self.x, self.record_blocks()
        pairs, reads = self.floats(self.M, self.HV, EVERY.value, self.K + EVERY.value), self.pairs(torch.float32)
        gates = self.floats(self.M, self.HV, 2, EVERY.value)
        at_start = self.floats(self.M, self.HV, self.K) if self.turns_back_in_gluon else None
        A, D, adjoints = self.steps(), self.steps(), self.state(self.M, self.dtype)
        inputs = x.k, x.v, x.gamma, x.decay
        self.launch(
            prepare_turns_back, (self.M, self.HV), x.q, *inputs, do, saved.along, saved.first_per_square, saved.states, pairs,
            reads, gates, A, D, at_start, dq, blocks, self.T, num_warps=1, num_stages=1,
            maxnreg=168 if self.dtype.itemsize == 2 else None,  # so that a multiprocessor runs 12 programs, not 8
        )  # fmt: skip
        if self.turns_back_in_gluon:
            from .turns_back_on_hopper import slots_back_in_turn  # needs Gluon

            self.launch(
                slots_back_in_turn, (self.N, self.HV, 4), x.q, *inputs, do, d_end, saved.along,
                saved.first_per_square, A, D, pairs, at_start, saved.states, adjoints, dS, x.cu_seqlens, self.T, num_warps=4,
            )  # fmt: skip
        else:
            slots = slots_per_program(self.K)  # of a program; with 32 of them its registers hold less ahead
            self.launch(
                turn_slots_back, (self.N, self.HV, self.tiles), x.q, *inputs, do, d_end, saved.along, saved.first_per_square,
                A, D, pairs, saved.states, adjoints, dS, x.cu_seqlens, self.T, SLOTS=slots, PAIRS_AHEAD=slots == 16,
                num_warps=slots // 2, num_stages=1,
            )  # fmt: skip
        self.launch(
            slot_gradients, (self.M, self.HV), *inputs, do, saved.along, saved.states, saved.first_per_square, pairs,
            saved.scores, A, D, adjoints, dk, dv, parts, self.B * self.T * self.HV, dS, blocks, self.T, PARTS=parts.shape[0],
            num_warps=1, num_stages=1,
        )  # fmt: skip
        return A, D


SPHERE = make_rule(Sphere)
