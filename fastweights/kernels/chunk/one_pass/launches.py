"""The launches of a forward and a backward in one pass, and which calls take them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import Any, NamedTuple

import torch

from ...common.delta_rule.channel_decay import chunk_gradients_channel
from ...common.delta_rule.launches import BegunGrads, ChunkOperands, DeltaRule
from ...common.delta_rule.sizes import SavedForBackward, segment_length
from ...common.packing import CHUNK
from ...runtime.gluon import runs_gluon
from ...runtime.workspace import TensorSpec
from ..key_energy import gate_groups

RECORD = CHUNK * CHUNK + 4 * CHUNK  # numbers of P and of two factors per token, in float32, in the record of a chunk


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
IDLE_REGISTERS = 128  # two programs of 8 warps per multiprocessor, most of which find nothing to do


class Tokens(NamedTuple):
    """What the passes take of tokens: queries, keys, and write keys, None where the keys write; with a decay per channel decayed,
    see `decay_channels`."""

    q: Any
    k: Any
    w: Any


def takes_one_pass(call: DeltaRule) -> bool:
    """Whether a call has these launches: wherever they were measured, they are faster."""
    x = call.memory
    has_rule = call.delta or (call.decay <= 1 and not call.writes)
    is_plain = not call.lasting and not call.finer and x.divisor is None
    has_sizes = call.K == 128 and call.V == 128 and call.dtype in (torch.bfloat16, torch.float16)
    return bool(has_rule and is_plain and has_sizes and runs_gluon(call.device))


def stages(tile: PassTile, w: Any, reads: bool = False) -> int:
    """Chunks in shared memory at once: with write keys w there is room for two, in `read_chunks` with 64 columns for three."""
    return tile.stages if w is None or (reads and tile is HALF) else 2


class OnePass(DeltaRule):
    """A forward that keeps nothing for a backward."""

    def set_up(self) -> None:
        super().set_up()
        self.constants |= {"H": self.H, "HV": self.HV}
        self.choose_segments()
        few = not self.cut and 2 * self.N * self.HV <= PROGRAMS
        self.pass_tile = HALF if few else WHOLE

    @property
    def makes_write_keys(self) -> bool:
        """Whether `solve_chunks` preconditions the keys. Of float16 inputs the preconditioner computes in tf32."""
        return self.precond and self.dtype == torch.bfloat16

    def write_keys(self, saved: SavedForBackward) -> Any:
        """None where the keys write."""
        return saved.write_keys if self.precond else self.memory.write_key

    def decayed(self) -> Tokens:
        """With a decay per channel, places for the tokens as they decay."""
        return Tokens(*(self.token_tensor(self.HV, self.K) if self.decay == 2 else None for _ in range(3)))

    def heads(self, tokens: Tokens) -> dict[str, int]:
        return {"H": int(tokens.q.shape[2]), "HEADS_W": self.group(tokens.w)}

    def choose_segments(self) -> None:
        programs = self.HV * (self.V // WHOLE.BV)
        self.length, self.cut = segment_length(self.B, self.T, programs, PROGRAMS)
        self.P = self.count_segments()

    def tables(self, kept: SavedForBackward) -> SavedForBackward:
        """Of what a backward would need, what the passes need, with the tables filled."""
        saved = SavedForBackward(key_energy=kept.key_energy, write_keys=kept.write_keys)
        if self.packed:
            saved = saved._replace(chunk_table=kept.chunk_table, segment_table=self.empty(self.P, 5, dtype=torch.int32))
            self.record_tables(saved)
        return saved

    def record_passes(self, o: Any, S_end: Any, saved: SavedForBackward) -> None:
        """Of `saved` what is None is not kept."""
        from .passes import read_chunks, summarize_chunks  # need Gluon
        from .solve import solve_chunks

        x, HV, scale = self.memory, self.HV, self.options[0]
        record = RECORD + CHUNK * CHUNK * self.delta
        made = self.empty(self.M, HV, record)
        segments = saved.segment_table if self.packed else None
        tokens, decayed = Tokens(x.q, x.k, self.write_keys(saved)), self.decayed()
        sizes = {"RECORD": record, "DECAY": self.decay}
        place = (segments, x.cu_seqlens, self.T, self.segment_tokens)
        gates: tuple[Any, ...] = (None, None, None, None)
        numbers = 0.0, 0.0
        if self.makes_write_keys:
            gates = saved.key_energy, x.precond_g, x.precond_beta, x.center
            numbers = log2(self.options[1]), self.options[2]
        self.launch(
            solve_chunks, (self.M, HV), *tokens, x.beta, x.g, *gates, made, saved.T, saved.G, *decayed, saved.chunk_table,
            self.T, scale, *numbers, **self.heads(tokens), **sizes, **gate_groups(self), HEADS_G=self.group(x.g),
            HEADS_BETA=self.group(x.beta), num_warps=4, maxnreg=SOLVE_REGISTERS,
        )  # fmt: skip
        if self.decay == 2:
            tokens = decayed
        heads = self.heads(tokens)
        added = transition = None
        if self.cut:
            added = self.floats(self.P, HV, self.V, self.K)
            transition = saved.transitions
            if transition is None:
                transition = self.empty(self.P, HV, self.K, self.K) if self.delta else self.floats(self.P, HV)
            columns = self.V + self.K * self.delta
            self.launch(
                summarize_chunks, (columns // HALF.BV * self.P, HV), *tokens[1:], x.v, made, added, transition, segments,
                self.T, self.segment_tokens, **heads, **sizes, BV=HALF.BV, STAGES=stages(HALF, tokens.w),
                LAST=saved.transitions is not None, num_warps=HALF.BV // 16,
            )  # fmt: skip
        tile = self.pass_tile
        self.launch(
            read_chunks, (self.V // tile.BV * self.P, HV), *tokens, x.v, made, x.S, added, transition, o, S_end, saved.u,
            saved.starts if self.cut else None, *place, scale, **heads, **sizes, BV=tile.BV, STARTED=x.S is not None,
            ENDED=S_end is not None, CUT=bool(self.cut), STAGES=stages(tile, tokens.w, True), num_warps=tile.BV // 16,
        )  # fmt: skip


class OnePassKept(OnePass):
    """A forward before a backward, and the backward, with the segments of the kernels in plain Triton."""

    def choose_segments(self) -> None:
        """Those that are chosen already."""

    def tables(self, kept: SavedForBackward) -> SavedForBackward:
        if self.packed:
            self.record_tables(kept)
        return kept

    def transform_chunks(self, saved: SavedForBackward, scale: float, reuse_saved: bool) -> ChunkOperands:
        """Of a backward: P, and what its passes take of the decays."""
        from .channel_back import score_channels  # need Gluon
        from .gradients import score_chunks

        x, HV, keys = self.memory, self.HV, self.write_keys(saved)
        w, u = x.k if keys is None else keys, x.v if saved.u is None else saved.u
        self.scores, self.factors = self.empty(self.M, HV, CHUNK, CHUNK), self.floats(self.M, HV, 4, CHUNK)
        self.tokens = self.decayed()
        if self.decay == 2:
            last_gate = self.floats(self.M, HV, self.K)
            self.launch(
                score_channels, (self.M, HV), x.q, x.k, keys, x.beta, x.g, *self.tokens, self.scores, self.factors, last_gate,
                saved.chunk_table, self.T, scale, HEADS_W=self.group(keys), HEADS_G=self.group(x.g),
                HEADS_BETA=self.group(x.beta), num_warps=4, maxnreg=SOLVE_REGISTERS,
            )  # fmt: skip
            return ChunkOperands(self.tokens.q, self.tokens.w, None, u, keys, last_gate=last_gate)
        self.tokens = Tokens(x.q, x.k, keys)
        self.launch(
            score_chunks, (self.M, HV), x.q, w, x.beta, saved.G, self.scores, self.factors, saved.chunk_table, self.T, scale,
            HEADS_W=self.group(w), HEADS_BETA=self.group(x.beta), num_warps=4,
        )  # fmt: skip
        return ChunkOperands(x.q, w, None, u, keys)

    def begin_grads(self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any) -> BegunGrads:
        """du: where `pass_back` writes z, of linear attention dV."""
        h, du = self.pass_state_again(chunks, saved), self.token_tensor(self.HV, self.V)
        return BegunGrads(h, du, self.token_tensor(self.HV, CHUNK) if self.decay == 2 else None)

    def value_gradient(self, begun: BegunGrads) -> TensorSpec:
        return super().value_gradient(begun) if self.delta else begun.du

    def record_value_grads(self, *arguments: Any) -> None:
        """`pass_back` has found these."""

    def pass_state_again(self, chunks: ChunkOperands, saved: SavedForBackward) -> TensorSpec:
        from .back import states_again  # needs Gluon

        x, tile = self.memory, HALF
        h, start = self.empty(self.M, self.HV, self.K, self.V), saved.starts if self.cut else x.S
        self.launch(
            states_again, (self.V // tile.BV * self.P, self.HV), chunks.write_key, chunks.u, self.factors, start, h,
            saved.segment_table if self.packed else None, self.T, self.segment_tokens,
            HEADS_W=self.group(chunks.write_key), BV=tile.BV, CHANNEL=self.decay == 2, STARTED=start is not None,
            STAGES=tile.stages, num_warps=tile.BV // 16,
        )  # fmt: skip
        return h

    def pass_state_back(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, du: Any, dS_end: Any, state_grads: bool
    ) -> tuple[TensorSpec, TensorSpec | None]:  # fmt: skip
        dh, dS = self.empty(self.M, self.HV, self.K, self.V), self.state(self.N) if state_grads else None
        added = None
        if self.cut:
            added = self.floats(self.P, self.HV, self.V, self.K)
            self.record_pass_back(chunks, saved, scale, do, du, None, added, None, None, True)
        self.record_pass_back(chunks, saved, scale, do, du, dS_end, added, dh, dS, False)
        return dh, dS

    def record_pass_back(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, do: Any, du: Any, dS_end: Any, added: Any, dh: Any,
        dS: Any, summary: bool,
    ) -> None:  # fmt: skip
        from .back import pass_back  # needs Gluon

        x, tile = self.memory, self.pass_tile
        self.launch(
            pass_back, (self.V // tile.BV * self.P, self.HV), *self.tokens, saved.T, self.scores, do, du,
            self.factors, dS_end, added,
            saved.transitions if self.cut else None, dh, dS, saved.segment_table if self.packed else None, x.cu_seqlens, self.T,
            self.segment_tokens, scale, **self.heads(self.tokens), CHANNEL=self.decay == 2, BV=tile.BV,
            STARTED=dS_end is not None, ENDED=dS is not None, CUT=bool(self.cut), SUMMARY=summary,
            STAGES=stages(tile, self.tokens.w), num_warps=tile.BV // 16,
        )  # fmt: skip

    def record_chunk_gradients(
        self, chunks: ChunkOperands, saved: SavedForBackward, scale: float, inputs: Any, u: Any, z: Any, do: Any, dP: Any,
        h: Any, dh: Any, grads: Any, **changed: Any,
    ) -> None:  # fmt: skip
        from .gradients import gradients_of_chunk  # needs Gluon

        x, (dq, dk, dw, dv, gates), w = self.memory, grads, chunks.plain_write_key
        self.launch(
            gradients_of_chunk, (gates.shape[0] * self.M, self.HV), x.q, x.k, w, x.v, x.beta, saved.G, self.factors, u, z, do, h,
            dh, saved.chunk_table, self.T, scale, dq, dk, dw, dv, gates, prod(gates.shape[1:]),
            HEADS_W=self.group(w), HEADS_BETA=self.group(x.beta), num_warps=4,
        )  # fmt: skip

    def record_channel_gradients(self, grid: tuple[int, int], arguments: Sequence[Any], **heads: int) -> None:
        """Those whose form is not flat in plain Triton."""
        from .channel_back import gradients_of_channels  # needs Gluon

        self.launch(gradients_of_channels, grid, *arguments, **heads, num_warps=4)
        self.launch(
            chunk_gradients_channel, grid, *arguments, self.H, self.HV, **heads, FLAT=False, BK=64, BV=32, num_warps=8,
            num_stages=1, maxnreg=IDLE_REGISTERS,
        )  # fmt: skip

    def partial_gates(self, name: str) -> TensorSpec:
        return self.floats(self.K // 64, 2, *self.rows, self.HV)
