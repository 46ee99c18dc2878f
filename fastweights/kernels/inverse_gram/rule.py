"""What the family computes, and the launches of a forward and a backward: where A^-1 is a sum, and where tokens also add to A."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from ..common.call import MULTIPROCESSORS, Call, Specs, make_rule, max_pieces, padded
from ..common.packing import CHUNK, record_tables
from ..runtime.gluon import runs_gluon
from ..runtime.workspace import TensorSpec
from .carried import carry_adjoint, carry_inverse, chunk_adjoint, finish_gradients
from .directions import token_products, token_rows
from .elimination import eliminate_tokens, invert_sums
from .segments import segment_gradients, solve_segment, solve_tokens
from .sums import scan_sums, segment_sums

ROWS = 16  # of a block that is eliminated at once
SCAN_BLOCK = 1024  # numbers of the state that one program adds up
SOLVE_REGISTERS = 128  # per thread, so that a multiprocessor runs two programs of 8 warps
SEGMENT_CHUNKS = 4, 8  # of 64 tokens in a segment: up to 64 channels, and with more
ENOUGH_PROGRAMS = 128  # of segments with 128 channels, one per multiprocessor


class GramInputs(namedtuple("GramInputs", "u b gain G cu_seqlens", defaults=(None,))):
    """u [B, T, h, K]; b [B, T, h', K] or None, where it is u; gain [B, T, h''] or None; G [N, HV, K, K] in float64; cu_seqlens
    [N+1] or None, on the device."""


class RefreshInputs(namedtuple("RefreshInputs", "u b refresh A cu_seqlens", defaults=(None,))):
    """u, b [B, T, h, K]; refresh [B, T, 1] in float32; A [N, HV, K, K]; cu_seqlens [N+1] or None, on the device."""


class Saved(namedtuple("Saved", "A R D chunk_table segment_table T", defaults=(None, None))):
    """In float32 the inverses at the chunks' starts [M, HV, K, K], r [BT, HV, K] and d [BT, HV]; the tables of chunks and of
    segments, these without a refresh; with a refresh T [M, HV, 64, 64]."""


class GramCall(Call):
    """What calls have in common whose state is a matrix [K, K] or its inverse. STATE: its name among the inputs."""

    STATE = "G"

    def find_heads(self) -> tuple[Any, Sequence[int]]:
        return self.x.u, getattr(self.x, self.STATE).shape[1:3]

    def set_up(self) -> None:
        self.PK = padded(self.K)
        # A weak direction of A stands beside 1e4 times stronger ones: always float32's precision.
        self.gradient_precision, self.precision = self.precision, "tf32x3"
        self.exact_tile = min(64 if self.dtype == torch.bfloat16 else 32, self.PK)  # with keys that need no tf32x3
        self.warps = 4 if self.PK <= 64 else 8  # of a program that holds a whole matrix
        # In which products take what a backward finds. Numbers of float16 have too few exponents.
        self.work = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        heads = {"HEADS": self.group(self.x.u), "HEADS_GAIN": self.group(getattr(self.x, "gain", None))}
        self.constants |= {"PRECISION": self.precision, "HV": self.HV, **heads}

    @property
    def solves_in_turn(self) -> bool:
        """Whether kernels in Gluon find r, d and A of the chunks, and what follows from them."""
        return self.K in (64, 128) and self.dtype == torch.bfloat16 and runs_gluon(self.device)

    def vectors(self, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return self.token_tensor(self.HV, self.K, dtype=dtype)

    def matrices(self, count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return self.empty(count, self.HV, self.K, self.K, dtype=dtype)

    def kept(self) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec | None]:
        """A, r, d and the table of chunks: see `Saved`."""
        chunks = self.empty(self.M, 2, dtype=torch.int32) if self.packed else None
        return self.matrices(self.M), self.vectors(), self.token_tensor(self.HV, dtype=torch.float32), chunks

    def launch_chunks(self, kernel: Any, saved: Saved, *arguments: Any, **constants: Any) -> None:
        """A kernel of one program per chunk and head."""
        options = {"num_warps": self.warps, "num_stages": 1, **constants}
        self.launch(kernel, (self.M, self.HV), *arguments, saved.chunk_table, self.T, **options)

    def record_solve(self, saved: Saved, b: Any, out: Any, precision: str, scaled: bool = False) -> None:
        """out_t = A_t b_t; `scaled`: times the gain."""
        gain, refresh = (getattr(self.x, name, None) for name in ("gain", "refresh"))
        if self.solves_in_turn:
            from .answers import answer_tokens  # needs Gluon

            self.launch_chunks(
                answer_tokens, saved, self.x.u, gain, refresh, saved.A, saved.R, saved.D, b, out, HEADS_B=self.group(b),
                SCALED=scaled, EXACT=precision == self.precision,
            )  # fmt: skip
            return
        self.launch_chunks(
            solve_tokens, saved, self.x.u, gain, refresh, saved.A, saved.R, saved.D, b, out, HEADS_B=self.group(b),
            SCALED=scaled, PRECISION=precision, maxnreg=SOLVE_REGISTERS if self.PK > 64 else None,
        )  # fmt: skip

    def launch_sequences(self, kernel: Any, *arguments: Any, programs: Sequence[int] = (), **constants: Any) -> None:
        """A kernel of one program per sequence and head, or so many."""
        grid = self.N, self.HV, *programs
        self.launch(kernel, grid, *arguments, self.x.cu_seqlens, self.T, self.HV, num_stages=1, **constants)


class InverseGram(GramCall):
    """Options: ridge. Outputs: y and G, this None unless it is wanted."""

    def set_up(self) -> None:
        super().set_up()
        self.length = CHUNK * SEGMENT_CHUNKS[self.PK > 64]
        if self.solves_in_turn and self.K == 128:
            # Twice as long where half as many programs fill the GPU, in half as many rounds: that spares inverses. Products serve
            # as branches, as sizes may be symbols.
            programs = self.B * self.T * self.HV // self.length
            half_fill = torch.sym_min(1, programs // (2 * ENOUGH_PROGRAMS))
            rounds_are_even = 1 - -(-programs // MULTIPROCESSORS) % 2
            self.length *= 1 + half_fill * rounds_are_even
        self.P = max_pieces(self.N, self.T, self.length, self.packed)
        self.constants["LENGTH"] = self.length

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        y = self.vectors(self.dtype if self.x.b is None else torch.float32)
        end = self.matrices(self.N, torch.float64) if final else None
        return (y, end), Saved(*self.kept(), self.empty(self.P, 5, dtype=torch.int32) if self.packed else None)

    def launch_segments(
        self, kernel: Any, saved: Saved, *arguments: Any, parts: Sequence[int] = (), **constants: Any
    ) -> None:
        """A kernel of one program per segment and head, or so many."""
        options = {"num_warps": self.warps, "num_stages": 1, **constants}
        self.launch(kernel, (self.P, self.HV, *parts), *arguments, saved.segment_table, self.T, **options)

    def record_states(self, saved: Saved, added: Sequence[Any], start: Any, end: Any, back: bool) -> TensorSpec:
        """From what the tokens add the state at the segments' starts; `back`: H at their ends."""
        sums, width = self.matrices(self.P), min(64 if back else self.exact_tile, self.PK)
        other = {"HEADS": 1, "PRECISION": self.gradient_precision} if back else {}
        parts = (-(-self.K // width),)
        self.launch_segments(segment_sums, saved, *added, sums, parts=parts, BK=width, num_warps=4, **other)
        blocks = -(-self.K * self.K // SCAN_BLOCK)
        self.launch_sequences(scan_sums, start, sums, end, programs=(blocks,), BACK=back, BLOCK=SCAN_BLOCK, num_warps=4)
        return sums

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x, (ridge,), HV, P = self.x, self.options, self.HV, self.P
        (y, end), saved = self.shapes(final)
        if self.packed:
            record_tables(self.recorder, x.cu_seqlens, saved.chunk_table, saved.segment_table, self.T, self.length)
        sums = self.record_states(saved, (x.u, None, None, x.gain), x.G, end, back=False)
        scratch = self.floats(P, HV, ROWS * self.PK + 512)
        self.launch(
            invert_sums, (P, HV), sums, saved.A, scratch, saved.segment_table, self.T, ridge, HV, num_warps=4, num_stages=1,
            maxnreg=168 if self.PK <= 64 else None,
        )  # fmt: skip
        answers = y if x.b is None else None
        if self.solves_in_turn:
            from .chunks_in_turn import solve_in_turn  # needs Gluon

            self.launch_segments(solve_in_turn, saved, x.u, x.gain, saved.A, saved.R, saved.D, answers)
        else:
            T, scratch = self.floats(P, HV, CHUNK, CHUNK), self.floats(P, HV, ROWS * CHUNK + 512)
            self.launch_segments(solve_segment, saved, x.u, x.gain, saved.A, saved.R, saved.D, answers, T, scratch)
        if x.b is not None:
            self.record_solve(saved, x.b, y, self.precision)
        return (y, end), saved

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> GramInputs:
        x, (dy, dG_end), precision = self.x, output_grads, self.gradient_precision
        alone = x.b is None
        adjoint, y, divisor = self.vectors(self.work), saved.R, saved.D
        self.record_solve(saved, dy, adjoint, precision, scaled=alone and x.gain is not None)
        if not alone:
            y, divisor = self.vectors(self.work), None
            self.record_solve(saved, x.b, y, precision)
        dG = self.matrices(self.N, torch.float64) if state_grads else None
        H = self.record_states(saved, (adjoint, y, divisor, None), dG_end, dG, back=True)
        du, db, dgain = self.vectors(self.dtype), None if alone else self.vectors(x.b.dtype), self.gate_gradient(x.gain)
        of_tokens = x.u, x.gain, adjoint, y, saved.D, H, dy, du, dgain, db
        if self.solves_in_turn:
            from .chunks_in_turn import gradients_in_turn  # needs Gluon

            self.launch_segments(gradients_in_turn, saved, *of_tokens, SELF=alone)
        else:
            self.launch_segments(segment_gradients, saved, *of_tokens, PRECISION=precision, SELF=alone)
        return GramInputs(du, db, dgain, dG)


class Refreshed(GramCall):
    """Outputs: y and A, this None unless it is wanted."""

    STATE = "A"

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        saved = Saved(*self.kept(), T=self.squares())
        return (self.vectors(), self.matrices(self.N) if final else None), saved

    def squares(self) -> TensorSpec:
        """The products of a chunk's tokens with each other."""
        return self.floats(self.M, self.HV, CHUNK, CHUNK)

    def record_table(self, saved: Saved) -> None:
        if self.packed:  # nothing here reads the place of a segment
            segments = self.empty(self.N, 5, dtype=torch.int32)
            record_tables(self.recorder, self.x.cu_seqlens, saved.chunk_table, segments, self.T, self.T + CHUNK)

    def record_tokens(self, saved: Saved) -> None:
        """r and d of all tokens and their T [M, HV, 64, 64] from A."""
        S, place = self.squares(), (saved.chunk_table, self.T, self.HV)
        grid, options = (self.M, self.HV), {"num_warps": 4, "num_stages": 1}
        self.launch(
            token_products, grid, self.x.u, self.x.refresh, saved.A, saved.R, S, *place, BK=self.exact_tile, **options
        )
        scratch = self.floats(self.M, self.HV, ROWS * CHUNK + 512)
        self.launch(eliminate_tokens, grid, S, saved.T, saved.D, scratch, *place, maxnreg=168, **options)
        self.launch(token_rows, grid, saved.T, saved.R, *place, BK=min(32, self.PK), **options)

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x = self.x
        (y, end), saved = self.shapes(final)
        self.record_table(saved)
        if self.solves_in_turn:
            from .inverse_in_turn import carry_in_turn, factor_tokens  # needs Gluon

            self.launch(
                carry_in_turn, (self.N, self.HV), x.u, x.refresh, x.A, saved.A, end, saved.R, saved.T, x.cu_seqlens, self.T,
                num_warps=self.warps,
            )  # fmt: skip
            self.launch_chunks(factor_tokens, saved, saved.R, saved.D, saved.T, num_warps=4)
        else:
            self.launch_sequences(carry_inverse, x.u, x.refresh, x.A, saved.A, end, num_warps=self.warps)
            self.record_tokens(saved)
        self.record_solve(saved, x.b, y, self.precision)
        return (y, end), saved

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> RefreshInputs:
        x, (dy, dA_end), precision = self.x, output_grads, self.gradient_precision
        db = self.vectors(x.b.dtype)
        self.record_solve(saved, dy, db, precision)
        E = self.matrices(self.M, torch.float32 if self.dtype == torch.float32 else torch.bfloat16)  # E - I
        # What passes from chunk to chunk stays in float32.
        N, adjoint = (self.matrices(self.M, self.work) for _ in range(2))
        direct = self.vectors()
        of_tokens = x.u, x.b, dy, saved.R, saved.D, saved.T, E, N, direct
        if self.solves_in_turn:
            from .carried_on_hopper import adjoint_of_chunk  # needs Gluon

            self.launch_chunks(adjoint_of_chunk, saved, *of_tokens, HEADS_B=self.group(x.b), num_warps=4)
        else:
            self.launch_chunks(chunk_adjoint, saved, *of_tokens, HEADS_B=self.group(x.b), PRECISION=precision)
        dA = self.matrices(self.N) if state_grads else None
        stages = 3 if self.PK <= 64 else 2 if E.dtype == torch.bfloat16 and self.has_large_shared_memory else 1
        self.launch_sequences(
            carry_adjoint, dA_end, E, N, adjoint, dA, STAGES=stages, PRECISION=precision, num_warps=self.warps
        )
        du = self.vectors(self.dtype)
        kept = x.u, x.refresh, saved.A, saved.R, saved.D, saved.T, adjoint, direct, du
        if self.solves_in_turn:
            from .carried_on_hopper import gradients_of_chunk

            self.launch_chunks(gradients_of_chunk, saved, *kept, num_warps=4)
        else:
            self.launch_chunks(finish_gradients, saved, *kept, PRECISION=precision)
        return RefreshInputs(du, db, None, dA)


INVERSE_GRAM = make_rule(InverseGram)
REFRESHED = make_rule(Refreshed)
