"""The launches of a forward and a backward in one pass, and which calls take them."""

from __future__ import annotations

from math import log2, prod
from typing import Any, NamedTuple

import torch

from ...common.delta_rule.channel_decay import strong_gradients_channel
from ...common.delta_rule.launches import DeltaRule, MemoryGrads
from ...common.delta_rule.sizes import MIN_SEGMENTS, SavedForBackward, segment_length
from ...common.packing import CHUNK
from ...runtime.gluon import runs_gluon
from ...runtime.workspace import TensorSpec
from ..key_energy import gate_groups, record_scan

RECORD = CHUNK * CHUNK + 9 * CHUNK  # numbers of P, of four per token and one per chunk, in float32, in a chunk's record


DECAYED = ("q_decayed", "k_decayed", "w_decayed")  # of what a forward keeps, see `decay_channels`


class PassTile(NamedTuple):
    """Value columns of a program, of which 16 are a warp's, and how many chunks there are in shared memory at once."""

    BV: int
    stages: int


# Measured on an H200. A multiprocessor holds one program. Programs of 128 columns load keys, queries,
# T and P once for these; where two of 64 columns find a multiprocessor each, they are faster.
WHOLE = PassTile(128, 3)
HALF = PassTile(64, 3)
PROGRAMS = 132  # of all columns, that keep an H100 or H200 busy
MIN_NARROW_SEGMENTS = 4  # of a row with heads of 64 channels, below which finding their states costs more than it saves
SOLVE_REGISTERS, MORE_SOLVE_REGISTERS = 128, 168  # per thread: four and three programs per multiprocessor
GRADIENT_REGISTERS, ADD_REGISTERS = 128, 80  # two and three programs of 8 warps, for the gradients of write keys
MOST_LOST = 200.0  # in base 2, by a channel in a chunk where one product has all pairs, as in `channel.py`
MANY_SEGMENTS = 8  # of a row, from which on it pays to find out how many a state needs; at 4 it costs 2 us per launch


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
    is_plain = not call.finer and x.divisor is None
    dtypes = (torch.bfloat16,) if call.decay == 2 else (torch.bfloat16, torch.float16)  # a wide range of exponents
    has_sizes = call.K == call.V and call.K in (64, 128) and call.dtype in dtypes
    return bool(has_rule and is_plain and has_sizes and runs_gluon(call.device))


def segments_kept(call: DeltaRule) -> tuple[int, int]:
    """The segments of a forward before a backward, as `segment_length`. Each has one program per head."""
    return segment_length(call.B, call.T, call.HV, PROGRAMS, least=2)


def record_length(call: DeltaRule, keeps: bool = True) -> int:
    """Numbers in the record of a chunk, where a backward follows with T."""
    return RECORD + CHUNK * CHUNK * (call.delta and keeps)


def stages(tile: PassTile, tokens: Tokens, reads: bool = False) -> int:
    """Chunks in shared memory at once: with write keys of 128 channels there is room for two, in `read_chunks` with 64 columns
    for three."""
    has_room = tokens.w is None or tokens.w.shape[-1] <= 64 or (reads and tile is HALF)
    return tile.stages if has_room else 2


def count_norms(norms: TensorSpec | None) -> int:
    """How many numbers a segment has, see `segments_needed`."""
    return 0 if norms is None else int(norms.shape[2])


class OnePass(DeltaRule):
    """A forward that keeps nothing for a backward."""

    keeps = False

    def set_up(self) -> None:
        super().set_up()
        self.record = record_length(self, self.keeps)
        self.constants |= {"H": self.H, "HV": self.HV, "RECORD": self.record, "LASTING": self.lasting}
        self.choose_segments()
        few = not self.cut and 2 * self.N * self.HV <= PROGRAMS
        self.pass_tile = self.tile_of_columns(few)

    def tile_of_columns(self, few: bool) -> PassTile:
        """few: whether programs of half of 128 columns find a multiprocessor each."""
        return HALF if few or self.V == HALF.BV else WHOLE

    @property
    def makes_write_keys(self) -> bool:
        """Whether `solve_chunks` preconditions the keys. Of float16 inputs the preconditioner computes in tf32."""
        return self.precond and self.dtype == torch.bfloat16

    @property
    def squash_numbers(self) -> tuple[float, float]:
        return log2(self.options[1]), self.options[2]

    def write_keys(self, saved: SavedForBackward) -> Any:
        """None where the keys write."""
        return saved.write_keys if self.precond else self.memory.write_key

    def decayed(self, saved: SavedForBackward) -> Tokens:
        """With a decay per channel, places for the tokens as they decay."""
        return Tokens(*(self.token_tensor(self.HV, self.K) if self.decay == 2 else None for _ in DECAYED))

    def solve_registers(self) -> int:
        """Per thread: more with a decay per channel, by halves, or where keys are preconditioned, as fewer would spill."""
        return MORE_SOLVE_REGISTERS if self.decay == 2 or self.makes_write_keys else SOLVE_REGISTERS

    def heads(self, tokens: Tokens) -> dict[str, int]:
        return {"H": int(tokens.q.shape[2]), "HEADS_W": self.group(tokens.w)}

    def choose_segments(self) -> None:
        least = MIN_SEGMENTS if self.V > HALF.BV else MIN_NARROW_SEGMENTS
        self.length, self.cut = segment_length(self.B, self.T, self.HV, PROGRAMS, least)
        self.P = self.count_segments()

    def tables(self, kept: SavedForBackward) -> SavedForBackward:
        """Of what a backward would need, what the passes need, with the tables filled."""
        records = self.empty(self.M, self.HV, self.record)
        saved = SavedForBackward(key_energy=kept.key_energy, write_keys=kept.write_keys, records=records)
        if self.packed:
            saved = saved._replace(chunk_table=kept.chunk_table, segment_table=self.empty(self.P, 5, dtype=torch.int32))
            self.record_tables(saved)
        return saved

    def norms(self, parts: int) -> TensorSpec | None:
        """Places for what `segments_needed` reads."""
        many = self.decay and -(-self.T // self.segment_tokens) >= MANY_SEGMENTS
        return self.floats(self.P, self.HV, parts) if many else None

    def place(self, saved: SavedForBackward) -> tuple[Any, Any, int, int]:
        """Where segments lie."""
        return saved.segment_table if self.packed else None, self.memory.cu_seqlens, self.T, self.segment_tokens

    def record_passes(self, o: Any, S_end: Any, saved: SavedForBackward) -> None:
        """Of `saved` what is None is not kept."""
        from .passes import read_chunks, summarize_chunks  # need Gluon
        from .solve import solve_chunks

        x, HV, scale, made = self.memory, self.HV, self.options[0], saved.records
        solved = self.empty(self.M, HV, CHUNK, CHUNK) if self.delta else None
        place = self.place(saved)
        tokens, decayed = Tokens(x.q, x.k, self.write_keys(saved)), self.decayed(saved)
        gates: tuple[Any, ...] = (None, None, None, None)
        numbers = 0.0, 0.0
        if self.makes_write_keys:
            gates, numbers = (saved.key_energy, x.precond_g, x.precond_beta, x.center), self.squash_numbers
        self.launch(
            solve_chunks, (self.M, HV), *tokens, x.beta, x.g, *gates, made, solved, *decayed, saved.gates, saved.last_gates,
            saved.chunk_table, self.T, scale, *numbers,
            **self.heads(tokens), **gate_groups(self), HEADS_G=self.group(x.g), HEADS_BETA=self.group(x.beta),
            DECAY=self.decay, KEPT=self.keeps, num_warps=4, maxnreg=self.solve_registers(),
        )  # fmt: skip
        if self.decay == 2:
            tokens = decayed
        sizes = {**self.heads(tokens), "DECAY": self.decay}
        added = transition = norms = None
        if self.cut:
            columns = self.V + self.K * self.delta
            added, norms = self.floats(self.P, HV, self.V, self.K), self.norms(columns // HALF.BV)
            transition = saved.transitions
            if transition is None:
                parts = 1 + self.lasting
                transition = self.empty(self.P, HV, parts, self.K, self.K) if self.delta else self.floats(self.P, HV)
            self.launch(
                summarize_chunks, (columns // HALF.BV * self.P, HV), *tokens[1:], x.v, made, solved, added, transition,
                norms, *place, **sizes, BV=HALF.BV, STAGES=stages(HALF, tokens), STARTED=x.S is not None,
                LAST=saved.transitions is not None and S_end is not None, num_warps=HALF.BV // 16,
            )  # fmt: skip
        tile = self.pass_tile
        self.launch(
            read_chunks, (self.V // tile.BV * self.P, HV), *tokens, x.v, made, solved, x.S, added, transition, norms, o,
            S_end, saved.u, saved.starts if self.cut else None, *place, scale, **sizes, BV=tile.BV, STARTED=x.S is not None,
            ENDED=S_end is not None, NORMS=count_norms(norms), STAGES=stages(tile, tokens, True), num_warps=tile.BV // 16,
        )  # fmt: skip


class OnePassKept(OnePass):
    """A forward before a backward, and the backward."""

    keeps = True

    def decayed(self, saved: SavedForBackward) -> Tokens:
        return Tokens(*(getattr(saved, name) for name in DECAYED))

    def choose_segments(self) -> None:
        self.length, self.cut = segments_kept(self)
        self.P = self.count_segments()

    def tables(self, kept: SavedForBackward) -> SavedForBackward:
        if self.packed:
            self.record_tables(kept)
        return kept

    def memory_grads(
        self, saved: SavedForBackward, scale: float, do: Any, dS_end: Any, state_grads: bool
    ) -> MemoryGrads:
        from .gradients_back import gradients_back  # needs Gluon

        if self.decay == 2:
            return self.channel_grads(saved, scale, do, dS_end, state_grads)
        x, HV, w, u = self.memory, self.HV, self.write_keys(saved), self.memory.v if saved.u is None else saved.u
        h = self.states_again(saved, x.k if w is None else w, u)
        added, norms = self.summaries_back(saved, Tokens(x.q, x.k, w), scale, do, dS_end)
        dq, dk, dv = (self.token_tensor(HV, self.K) for _ in range(3))
        dw = None if w is None else self.token_tensor(HV, self.K)
        dS, gates = self.state(self.N) if state_grads else None, self.floats(1, 2, *self.rows, HV)
        self.launch(
            gradients_back, (self.P, HV), x.q, x.k, w, x.v, saved.records, do, u, h, dS_end, added,
            saved.transitions if self.cut else None, norms, dS, dq, dk, dw, dv, gates, *self.place(saved), prod(gates.shape[2:]),
            scale, HEADS_W=self.group(w), DECAY=self.decay == 1, STARTED=dS_end is not None, ENDED=dS is not None,
            NORMS=count_norms(norms), num_warps=self.V // 16,
        )  # fmt: skip
        return MemoryGrads(dq, dk, dv, dw, None, dS, gates)

    def write_key_grads(
        self, saved: SavedForBackward, dw: Any, dk: Any, dA_end: Any, state_grads: bool
    ) -> tuple[Any, ...]:
        """As `MemoryCall.write_key_grads`."""
        from .write_keys_back import add_later_grads, write_key_grads  # need Gluon

        x, M, HV = self.memory, self.M, self.HV
        sums, totals, dcenter = self.floats(M, HV, self.K), self.floats(M, HV), self.floats(M, HV)
        dg, dbeta = (self.token_tensor(HV, dtype=torch.float32) for _ in range(2))
        place, gates = (saved.chunk_table, self.T), (x.precond_g, x.precond_beta)
        self.launch(
            write_key_grads, (M, HV), x.k, dw, dk, saved.key_energy, *gates, x.center, sums, totals, dcenter, dg, dbeta, *place,
            *self.squash_numbers, **gate_groups(self), num_warps=8, maxnreg=GRADIENT_REGISTERS,
        )  # fmt: skip
        dA = self.floats(self.N, HV, self.K) if state_grads else None
        record_scan(self, sums, totals, dA_end, dA, back=True)
        self.launch(
            add_later_grads, (M, HV), x.k, dk, saved.key_energy, sums, *gates, dg, dbeta, *place, **gate_groups(self),
            num_warps=8, maxnreg=ADD_REGISTERS,
        )  # fmt: skip
        return dcenter, dg, dbeta, dA

    def states_again(self, saved: SavedForBackward, w: Any, u: Any) -> TensorSpec:
        """The states at the chunks' starts."""
        from .back import states_again  # needs Gluon

        tile, start = HALF, saved.starts if self.cut else self.memory.S
        h = self.empty(self.M, self.HV, self.K, self.V)
        self.launch(
            states_again, (self.V // tile.BV * self.P, self.HV), w, u, saved.records, start, h, *self.place(saved),
            HEADS_W=self.group(w), BV=tile.BV, CHANNEL=self.decay == 2, STARTED=start is not None, STAGES=tile.stages,
            num_warps=tile.BV // 16,
        )  # fmt: skip
        return h

    def summaries_back(
        self, saved: SavedForBackward, tokens: Tokens, scale: float, do: Any, dS_end: Any
    ) -> tuple[Any, Any]:
        """What segments add to the gradient of the state before them, transposed, and their norms; nothing where there is one."""
        from .back import summarize_back  # needs Gluon

        if not self.cut:
            return None, None
        # The first segments have nothing to do.
        tile = self.tile_of_columns(2 * (self.P - self.N) * self.HV <= PROGRAMS)
        added, norms = self.floats(self.P, self.HV, self.V, self.K), self.norms(self.V // tile.BV)
        self.launch(
            summarize_back, (self.V // tile.BV * self.P, self.HV), *tokens, saved.records, do, saved.transitions, added,
            norms, *self.place(saved), scale, **self.heads(tokens), BV=tile.BV, CHANNEL=self.decay == 2,
            STARTED=dS_end is not None, STAGES=stages(tile, tokens), num_warps=tile.BV // 16,
        )  # fmt: skip
        return added, norms

    def channel_grads(
        self, saved: SavedForBackward, scale: float, do: Any, dS_end: Any, state_grads: bool
    ) -> MemoryGrads:
        """With one decay per channel. Halves of the channels that lose too much in a chunk are left to plain Triton."""
        from .channel_back import channel_gradients_back  # needs Gluon

        x, HV, K, V, w = self.memory, self.HV, self.K, self.V, self.write_keys(saved)
        tokens = self.decayed(saved)
        h = self.states_again(saved, tokens.w, saved.u)
        added, norms = self.summaries_back(saved, tokens, 1.0, do, dS_end)
        dq, dk, dg = self.token_tensor(HV, K), self.token_tensor(HV, K), self.token_tensor(HV, K, dtype=torch.float32)
        dw = self.token_tensor(HV, K) if self.writes else None
        dv, z, dP = self.token_tensor(HV, V), self.token_tensor(HV, V), self.token_tensor(HV, CHUNK)
        dh, dS = self.empty(self.M, HV, K, V), self.state(self.N) if state_grads else None
        gate_grads = self.floats(K // 64, 2, *self.rows, HV)
        stride = prod(gate_grads.shape[1:])
        self.launch(
            channel_gradients_back, (self.P, HV), *tokens, x.v, saved.gates, saved.records, do, saved.u, h, dS_end, added,
            saved.transitions if self.cut else None, norms, dS, dq, dk, dw, dv, dg, gate_grads, z, dP, dh, *self.place(saved),
            stride, scale, STARTED=dS_end is not None, ENDED=dS is not None, NORMS=count_norms(norms), num_warps=V // 16,
        )  # fmt: skip
        self.launch(
            strong_gradients_channel, (-(-2 * PROGRAMS // HV), HV), x.q, x.k, w, x.v, x.beta, x.g, saved.last_gates, saved.u, z,
            do, dP, h, dh, saved.chunk_table, self.T, scale, dq, dk, dw, dv, gate_grads, dg, stride, self.H, HV, self.M,
            HEADS_G=self.group(x.g), HEADS_BETA=self.group(x.beta), HEADS_W=self.group(w), MOST=MOST_LOST, BK=64,
            BV=32, num_warps=8, num_stages=1,
        )  # fmt: skip
        return MemoryGrads(dq, dk, dv, dw, dg, dS, gate_grads)
