"""The launches of a forward and a backward in one pass, and which calls take them."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from ...common.call import Specs
from ...common.delta_rule.launches import ChunkOperands, DeltaRule
from ...common.delta_rule.sizes import SavedForBackward, segment_length
from ...common.packing import CHUNK, record_tables
from ...runtime.gluon import runs_gluon
from ...runtime.workspace import TensorSpec

SQUARES = 2 * CHUNK * CHUNK  # numbers of T and P in the record of a chunk
RECORD = SQUARES + 4 * CHUNK  # and two factors per token, in float32


class PassTile(NamedTuple):
    """Value columns of a program, of which 16 are a warp's, and how many chunks there are in shared memory at once."""

    BV: int
    stages: int


# Measured on an H200. A multiprocessor holds one program. Programs of 128 columns load keys, queries,
# T and P once for these; where two of 64 columns find a multiprocessor each, they are faster.
WHOLE = PassTile(128, 3)
HALF = PassTile(64, 3)
PROGRAMS = 132  # of 128 columns, that keep an H100 or H200 busy
SOLVE_REGISTERS = 128  # per thread: four programs per multiprocessor


def takes_one_pass(call: DeltaRule) -> bool:
    """Whether a call has these launches: wherever they were measured, they are faster."""
    x = call.memory
    return (
        runs_gluon(call.device)
        and call.dtype in (torch.bfloat16, torch.float16)
        and call.K == 128 and call.V == 128
        and call.delta and call.decay <= 1 and not call.writes and x.write_key_rest is None and x.divisor is None
    )  # fmt: skip


class OnePass(DeltaRule):
    """A forward that keeps nothing for a backward."""

    def set_up(self) -> None:
        super().set_up()
        self.choose_segments()
        few = not self.cut and 2 * self.N * self.HV <= PROGRAMS
        self.pass_tile = HALF if few else WHOLE

    def choose_segments(self) -> None:
        programs = self.HV * (self.V // WHOLE.BV)
        self.length, self.cut = segment_length(self.B, self.T, programs, PROGRAMS)
        self.P = self.count_segments()

    def record_inference(self, final: bool) -> Specs:
        o, S_end = self.token_tensor(self.HV, self.V), self.state(self.N) if final else None
        chunks = segments = None
        if self.packed:
            chunks, segments = self.empty(self.M, 2, dtype=torch.int32), self.empty(self.P, 5, dtype=torch.int32)
            record_tables(self.recorder, self.memory.cu_seqlens, chunks, segments, self.T, self.segment_tokens)
        self.record_passes(o, S_end, SavedForBackward(chunk_table=chunks, segment_table=segments))
        return o, S_end

    def record_passes(self, o: Any, S_end: Any, saved: SavedForBackward) -> None:
        """Of `saved` what is None is not kept."""
        from .passes import read_chunks, summarize_chunks  # need Gluon
        from .solve import solve_chunks

        x, HV, scale = self.memory, self.HV, self.options[0]
        made = self.empty(self.M, HV, RECORD)
        segments = saved.segment_table if self.packed else None
        sizes = {"H": self.H, "HV": HV, "RECORD": RECORD, "DECAY": self.decay == 1}
        place = (segments, x.cu_seqlens, self.T, self.segment_tokens)
        self.launch(
            solve_chunks, (self.M, HV), x.q, x.k, x.beta, x.g, made, saved.T, saved.G, saved.chunk_table, self.T, scale, **sizes,
            HEADS_G=self.group(x.g), HEADS_BETA=self.group(x.beta), num_warps=4, maxnreg=SOLVE_REGISTERS,
        )  # fmt: skip
        added = transition = None
        if self.cut:
            added = self.floats(self.P, HV, self.V, self.K)
            transition = self.empty(self.P, HV, self.K, self.K) if saved.transitions is None else saved.transitions
            self.launch(
                summarize_chunks, ((self.V + self.K) // HALF.BV * self.P, HV), x.k, x.v, made, added, transition, segments,
                self.T, self.segment_tokens, **sizes, BV=HALF.BV, STAGES=HALF.stages,
                LAST=saved.transitions is not None, num_warps=HALF.BV // 16,
            )  # fmt: skip
        tile = self.pass_tile
        self.launch(
            read_chunks, (self.V // tile.BV * self.P, HV), x.q, x.k, x.v, made, x.S, added, transition, o, S_end, saved.u,
            saved.starts if self.cut else None, *place, scale, **sizes, BV=tile.BV, STARTED=x.S is not None,
            ENDED=S_end is not None, CUT=bool(self.cut), STAGES=tile.stages, num_warps=tile.BV // 16,
        )  # fmt: skip


class OnePassKept(OnePass):
    """A forward before a backward, and the backward, with the segments of the kernels in plain Triton."""

    def set_up(self) -> None:
        super().set_up()
        self.sizes = {"H": self.H, "HV": self.HV}

    def choose_segments(self) -> None:
        """Those that are chosen already."""

    def record_forward(self, o: Any, S_end: Any, saved: SavedForBackward) -> None:
        if self.packed:
            self.record_tables(saved)
        self.record_passes(o, S_end, saved)

    def transform_chunks(self, saved: SavedForBackward, scale: float, reuse_saved: bool) -> ChunkOperands:
        """Of a backward: P, and what its passes take of the decays."""
        from .gradients import score_chunks  # needs Gluon

        x, HV = self.memory, self.HV
        self.scores, self.factors = self.empty(self.M, HV, CHUNK, CHUNK), self.floats(self.M, HV, 4, CHUNK)
        self.launch(
            score_chunks, (self.M, HV), x.q, x.k, x.beta, saved.G, self.scores, self.factors, saved.chunk_table, self.T, scale,
            **self.sizes, HEADS_BETA=self.group(x.beta), num_warps=4,
        )  # fmt: skip
        return ChunkOperands(x.q, x.k, None, saved.u, x.k)

    def record_value_grads(self, *arguments: Any) -> None:
        """`pass_back` and `gradients_of_chunk` find these themselves."""

    def pass_state_again(self, chunks: ChunkOperands, saved: SavedForBackward) -> TensorSpec:
        from .back import states_again  # needs Gluon

        x, tile = self.memory, HALF
        h, start = self.empty(self.M, self.HV, self.K, self.V), saved.starts if self.cut else x.S
        self.launch(
            states_again, (self.V // tile.BV * self.P, self.HV), x.k, saved.u, self.factors, start, h,
            saved.segment_table if self.packed else None, self.T, self.segment_tokens, **self.sizes, BV=tile.BV,
            STARTED=start is not None, STAGES=tile.stages, num_warps=tile.BV // 16,
        )  # fmt: skip
        return h

    def pass_state_back(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, du: Any, dS_end: Any, state_grads: bool
    ) -> tuple[TensorSpec, TensorSpec | None]:  # fmt: skip
        dh, dS = self.empty(self.M, self.HV, self.K, self.V), self.state(self.N) if state_grads else None
        added = None
        if self.cut:
            added = self.floats(self.P, self.HV, self.V, self.K)
            self.record_pass_back(saved, scale, do, du, None, added, None, None, True)
        self.record_pass_back(saved, scale, do, du, dS_end, added, dh, dS, False)
        return dh, dS

    def record_pass_back(
        self, saved: SavedForBackward, scale: float, do: Any, du: Any, dS_end: Any, added: Any, dh: Any, dS: Any, summary: bool
    ) -> None:  # fmt: skip
        from .back import pass_back  # needs Gluon

        x, tile = self.memory, self.pass_tile
        self.launch(
            pass_back, (self.V // tile.BV * self.P, self.HV), x.q, x.k, saved.T, self.scores, do, du,
            self.factors, dS_end, added,
            saved.transitions if self.cut else None, dh, dS, saved.segment_table if self.packed else None, x.cu_seqlens, self.T,
            self.segment_tokens, scale, **self.sizes, BV=tile.BV, STARTED=dS_end is not None, ENDED=dS is not None,
            CUT=bool(self.cut), SUMMARY=summary, STAGES=tile.stages, num_warps=tile.BV // 16,
        )  # fmt: skip

    def record_chunk_gradients(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, inputs: Any, u: Any, z: Any, do: Any, dP: Any,
        h: Any, dh: Any, grads: Any, **changed: Any,
    ) -> None:  # fmt: skip
        from .gradients import gradients_of_chunk  # needs Gluon

        x, (dq, dk, _, dv, gates) = self.memory, grads
        self.launch(
            gradients_of_chunk, (gates.shape[0] * self.M, self.HV), x.q, x.k, x.v, x.beta, saved.G, self.factors, u, z, do, h, dh,
            saved.chunk_table, self.T, scale, dq, dk, dv, gates, prod(gates.shape[1:]), **self.sizes,
            HEADS_BETA=self.group(x.beta), num_warps=4,
        )  # fmt: skip

    def partial_gates(self, name: str) -> TensorSpec:
        return self.floats(self.K // 64, 2, *self.rows, self.HV)
