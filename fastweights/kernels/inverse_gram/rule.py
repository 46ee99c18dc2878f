"""What the family computes, and the launches of a forward and a backward: where A^-1 is a sum, and where tokens also add to A."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from ..common.call import Call, Specs, make_rule, padded
from ..common.packing import CHUNK, SEGMENT_NUMBERS, record_tables
from ..runtime.workspace import TensorSpec
from .carried import carry_adjoint, carry_inverse, chunk_adjoint, finish_gradients
from .directions import direction_gradients, solve_tokens, token_products, token_rows
from .elimination import eliminate_blocks
from .sums import chunk_sums, scan_sums

ROWS = 16  # of a block that is eliminated at once
SCAN_BLOCK = 1024  # numbers of the state that one program adds up


class GramInputs(namedtuple("GramInputs", "u b gain G cu_seqlens", defaults=(None,))):
    """u [B, T, h, K]; b [B, T, h', K] or None, where it is u; gain [B, T, h''] or None; G [N, HV, K, K] in float64; cu_seqlens
    [N+1] or None, on the device."""


class RefreshInputs(namedtuple("RefreshInputs", "u b refresh A cu_seqlens", defaults=(None,))):
    """u, b [B, T, h, K]; refresh [B, T, 1] in float32; A [N, HV, K, K]; cu_seqlens [N+1] or None, on the device."""


class Saved(namedtuple("Saved", "A R D chunk_table T", defaults=(None,))):
    """In float32 the inverses at the chunks' starts [M, HV, K, K], r [BT, HV, K] and d [BT, HV]; the table of chunks; with a
    refresh T [M, HV, 64, 64]."""


class GramCall(Call):
    """What calls have in common whose state is a matrix [K, K] or its inverse. STATE: its name among the inputs. gain, refresh:
    of the tokens, None where a rule has none."""

    STATE = "G"

    def find_heads(self) -> tuple[Any, Sequence[int]]:
        return self.x.u, getattr(self.x, self.STATE).shape[1:3]

    def set_up(self) -> None:
        self.gain, self.refresh = (getattr(self.x, name, None) for name in ("gain", "refresh"))
        self.PK = padded(self.K)
        # A weak direction of A stands beside 1e4 times stronger ones: always float32's precision.
        self.gradient_precision, self.precision = self.precision, "tf32x3"
        self.exact_tile = min(64 if self.dtype == torch.bfloat16 else 32, self.PK)  # with keys that need no tf32x3
        self.warps = 4 if self.PK <= 64 else 8  # of a program that holds a whole matrix
        heads = {"HEADS": self.group(self.x.u), "HEADS_GAIN": self.group(self.gain)}
        self.constants |= {"PRECISION": self.precision, **heads}

    def vectors(self, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return self.token_tensor(self.HV, self.K, dtype=dtype)

    def matrices(self, count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return self.empty(count, self.HV, self.K, self.K, dtype=dtype)

    def squares(self) -> TensorSpec:
        """The products of a chunk's tokens with each other."""
        return self.floats(self.M, self.HV, CHUNK, CHUNK)

    def kept(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """A, r and d: see `Saved`."""
        return self.matrices(self.M), self.vectors(), self.token_tensor(self.HV, dtype=torch.float32)

    def table(self) -> TensorSpec | None:
        return self.empty(self.M, 2, dtype=torch.int32) if self.packed else None

    def choose_tile(self, precision: str) -> int:
        """Key channels of a program's tile; where a product is three, wider ones spill."""
        return min(32 if precision == "tf32x3" else 64, self.PK)

    def launch_chunks(self, kernel: Any, saved: Any, *arguments: Any, parts: int = 1, **constants: Any) -> None:
        """A kernel of `parts` programs per chunk and head."""
        grid, options = (parts * self.M, self.HV), {"num_warps": 4, "num_stages": 1, **constants}
        self.launch(kernel, grid, *arguments, saved.chunk_table, self.T, self.HV, **options)

    def launch_sequences(self, kernel: Any, *arguments: Any, programs: Sequence[int] = (), **constants: Any) -> None:
        """A kernel of one program per sequence and head, or so many."""
        grid = self.N, self.HV, *programs
        self.launch(kernel, grid, *arguments, self.x.cu_seqlens, self.T, self.HV, num_stages=1, **constants)

    def record_table(self, saved: Any) -> None:
        if self.packed:  # nothing here reads the place of a segment
            segments = self.empty(self.N, SEGMENT_NUMBERS, dtype=torch.int32)
            tokens = self.T + CHUNK
            record_tables(self.recorder, self.x.cu_seqlens, saved.chunk_table, segments, self.T, tokens)

    def record_elimination(
        self, saved: Any, matrix: Any, out: Any, ridge: float, size: int, tokens: bool = False
    ) -> None:
        PK = padded(size)
        self.launch(
            eliminate_blocks, (self.M, self.HV), matrix, out, saved.D if tokens else None, self.gain if tokens else None,
            self.floats(self.M, self.HV, ROWS, PK), saved.chunk_table, self.T, ridge, self.HV, K=size, PK=PK,
            TOKENS=tokens, num_warps=4, num_stages=1, maxnreg=168 if PK <= 64 else None,
        )  # fmt: skip

    def record_tokens(self, saved: Any, T: TensorSpec, y: Any, ridge: float) -> None:
        """r and d of all tokens and their T [M, HV, 64, 64] from A; y where b is u."""
        u, S = self.x.u, self.squares()
        self.launch_chunks(token_products, saved, u, self.refresh, saved.A, saved.R, S, BK=self.exact_tile)
        self.record_elimination(saved, S, T, ridge, CHUNK, tokens=True)
        tile = self.choose_tile(self.precision)
        self.launch_chunks(token_rows, saved, u, self.gain, T, saved.D, saved.R, y, BK=tile)

    def record_solve(self, saved: Any, b: Any, out: Any, precision: str, scaled: bool = False) -> None:
        """out_t = A_t b_t; `scaled`: times the gain."""
        self.launch_chunks(
            solve_tokens, saved, self.x.u, self.gain, self.refresh, saved.A, saved.R, saved.D, b, out, PRECISION=precision,
            BK=self.choose_tile(precision), HEADS_B=self.group(b), SCALED=scaled,
        )  # fmt: skip


class InverseGram(GramCall):
    """Options: ridge. Outputs: y and G, this None unless it is wanted."""

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        y = self.vectors(self.dtype if self.x.b is None else torch.float32)
        end = self.matrices(self.N, torch.float64) if final else None
        return (y, end), Saved(*self.kept(), self.table())

    def record_states(self, saved: Saved, added: Sequence[Any], start: Any, end: Any, back: bool) -> TensorSpec:
        """The state at the chunks' starts from what the tokens add; `back`: H at the chunks' ends."""
        sums, width = self.matrices(self.M), min(64 if back else self.exact_tile, self.PK)
        other = {"HEADS": 1, "HEADS_GAIN": 1, "PRECISION": self.gradient_precision} if back else {}
        self.launch_chunks(chunk_sums, saved, *added, sums, parts=-(-self.K // width), BK=width, **other)
        blocks = -(-self.K * self.K // SCAN_BLOCK)
        self.launch_sequences(scan_sums, start, sums, end, programs=(blocks,), BACK=back, BLOCK=SCAN_BLOCK, num_warps=4)
        return sums

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x, (ridge,) = self.x, self.options
        (y, end), saved = self.shapes(final)
        self.record_table(saved)
        G = self.record_states(saved, (x.u, None, None, x.gain), x.G, end, back=False)
        self.record_elimination(saved, G, saved.A, ridge, self.K)
        self.record_tokens(saved, self.squares(), y if x.b is None else None, ridge)
        if x.b is not None:
            self.record_solve(saved, x.b, y, self.precision)
        return (y, end), saved

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> GramInputs:
        x, (dy, dG_end), precision = self.x, output_grads, self.gradient_precision
        alone = x.b is None
        adjoint, y, divisor = self.vectors(), saved.R, saved.D
        self.record_solve(saved, dy, adjoint, precision, scaled=alone and x.gain is not None)
        if not alone:
            y, divisor = self.vectors(), None
            self.record_solve(saved, x.b, y, self.precision)
        dG = self.matrices(self.N, torch.float64) if state_grads else None
        H = self.record_states(saved, (adjoint, y, divisor, None), dG_end, dG, back=True)
        du, db, dgain = self.vectors(self.dtype), None if alone else self.vectors(x.b.dtype), self.gate_gradient(x.gain)
        self.launch_chunks(
            direction_gradients, saved, x.u, x.gain, adjoint, y, divisor, H, dy, du, dgain, db, PRECISION=precision,
            BK=self.choose_tile(precision), SELF=alone, num_warps=self.warps,
        )  # fmt: skip
        return GramInputs(du, db, dgain, dG)


class Refreshed(GramCall):
    """Outputs: y and A, this None unless it is wanted."""

    STATE = "A"

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        saved = Saved(*self.kept(), self.table(), self.squares())
        return (self.vectors(), self.matrices(self.N) if final else None), saved

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        x = self.x
        (y, end), saved = self.shapes(final)
        self.record_table(saved)
        self.launch_sequences(carry_inverse, x.u, x.refresh, x.A, saved.A, end, num_warps=self.warps)
        self.record_tokens(saved, saved.T, None, 0.0)
        self.record_solve(saved, x.b, y, self.precision)
        return (y, end), saved

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> RefreshInputs:
        x, (dy, dA_end), precision = self.x, output_grads, self.gradient_precision
        db = self.vectors(x.b.dtype)
        self.record_solve(saved, dy, db, precision)
        rounded = self.dtype != torch.float32
        E = self.matrices(self.M, torch.bfloat16 if rounded else torch.float32)  # E - I
        N, adjoint = self.matrices(self.M), self.matrices(self.M)
        direct, W, V, rest = (self.vectors() for _ in range(4))
        tile = self.choose_tile(precision)

        def record_chunks(at_ends: Any, *results: Any) -> None:
            self.launch_chunks(
                chunk_adjoint, saved, x.u, x.b, dy, x.refresh, saved.R, saved.D, saved.T, at_ends, *results, direct, W, V, rest,
                BK=tile, HEADS_B=self.group(x.b), PRECISION=precision,
            )  # fmt: skip

        record_chunks(None, E, N)
        dA = self.matrices(self.N) if state_grads else None
        stages = 3 if self.PK <= 64 else 2 if rounded and self.has_large_shared_memory else 1
        self.launch_sequences(
            carry_adjoint, dA_end, E, N, adjoint, dA, STAGES=stages, PRECISION=precision, num_warps=self.warps
        )
        record_chunks(adjoint, None, None)
        du = self.vectors(self.dtype)
        self.launch_chunks(finish_gradients, saved, saved.A, V, rest, du, BK=tile, PRECISION=precision)
        return RefreshInputs(du, db, None, dA)


INVERSE_GRAM = make_rule(InverseGram)
REFRESHED = make_rule(Refreshed)
