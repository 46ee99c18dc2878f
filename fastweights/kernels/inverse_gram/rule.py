"""What the family computes, and the launches of a forward and a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..chunk.sizes import max_pieces
from ..chunk.tiles import padded
from ..packing import CHUNK, record_tables
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .directions import solve_tokens, token_products, token_rows
from .elimination import eliminate_blocks
from .gradients import direction_gradients
from .sums import chunk_sums, scan_sums

__all__ = ["INVERSE_GRAM", "GramInputs"]

ROWS = 16  # of a block that is eliminated at once
SCAN_BLOCK = 1024  # numbers of the state that one program adds up


class GramInputs(NamedTuple):
    """u [B, T, h, K]; b [B, T, h', K] or None, where it is u; gain [B, T, h''] or None; G [N, HV, K, K] in float64; cu_seqlens
    [N+1] or None, on the device."""

    u: Any
    b: Any
    gain: Any
    G: Any
    cu_seqlens: Any = None


class Saved(NamedTuple):
    """In float32 the inverses at the chunks' starts [M, HV, K, K], r [BT, HV, K] and d [BT, HV]; the table of chunks."""

    A: Any
    R: Any
    D: Any
    chunk_table: Any


class GramSizes:
    def __init__(self, x: Any, state: Any) -> None:
        self.dtype = x.u.dtype
        self.B, self.T = x.u.shape[:2]
        self.N, self.HV, self.K = state.shape[:3]
        self.PK = padded(self.K)
        self.packed = x.cu_seqlens is not None
        self.M = max_pieces(self.N, self.T, CHUNK, self.packed)
        # A weak direction of A stands beside 1e4 times stronger ones: always float32's precision.
        self.precision = "tf32x3"
        self.exact_tile = min(64 if self.dtype == torch.bfloat16 else 32, self.PK)  # with keys that need no tf32x3
        self.of_gradients = "tf32x3" if self.dtype == torch.float32 else "tf32"

    def per_token(self, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return TensorSpec((self.B, self.T, *shape), dtype)

    def vectors(self, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return self.per_token(self.HV, self.K, dtype=dtype)

    def matrices(self, count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return TensorSpec((count, self.HV, self.K, self.K), dtype)

    def group(self, x: Any) -> int:
        """How many value heads one head of x serves."""
        return 1 if x is None else self.HV // x.shape[2]

    def tile(self, precision: str) -> int:
        """Key channels of a program's tile; where a product is three, wider ones spill."""
        return min(32 if precision == "tf32x3" else 64, self.PK)

    def record_table(self, recorder: Recorder, x: Any, saved: Any) -> None:
        if self.packed:  # nothing here reads the place of a segment
            segments = TensorSpec((self.N, 5), torch.int32)
            record_tables(recorder, x.cu_seqlens, saved.chunk_table, segments, self.T, self.T + CHUNK)

    def record_states(
        self, recorder: Recorder, x: GramInputs, saved: Saved, added: tuple[Any, ...], start: Any, end: Any, back: bool
    ) -> TensorSpec:
        """The state at the chunks' starts from what the tokens add; `back`: H at the chunks' ends."""
        precision = self.of_gradients if back else self.precision
        sums, width = self.matrices(self.M), min(64 if back else self.exact_tile, self.PK)
        heads = (1, 1) if back else (self.group(x.u), self.group(x.gain))
        recorder.launch(
            chunk_sums, (-(-self.K // width) * self.M, self.HV), *added, sums, saved.chunk_table, self.T, self.HV,
            K=self.K, PK=self.PK, BK=width, HEADS=heads[0], HEADS_GAIN=heads[1],
            PRECISION=precision, num_warps=4, num_stages=1,
        )  # fmt: skip
        recorder.launch(
            scan_sums, (self.N, self.HV, -(-self.K * self.K // SCAN_BLOCK)), start, sums, end, x.cu_seqlens, self.T, self.HV,
            K=self.K, BACK=back, BLOCK=SCAN_BLOCK, num_warps=4, num_stages=1,
        )  # fmt: skip
        return sums

    def record_elimination(
        self, recorder: Recorder, gain: Any, saved: Any, matrix: TensorSpec, out: TensorSpec, ridge: float,
        size: int, tokens: bool = False,
    ) -> None:  # fmt: skip
        padded_size = padded(size)
        scratch = TensorSpec((self.M, self.HV, ROWS, padded_size), torch.float32)
        recorder.launch(
            eliminate_blocks, (self.M, self.HV), matrix, out, saved.D if tokens else None, gain if tokens else None, scratch,
            saved.chunk_table, self.T, ridge, self.HV, K=size, PK=padded_size, HEADS_GAIN=self.group(gain), TOKENS=tokens,
            PRECISION=self.precision, num_warps=4, num_stages=1, maxnreg=168 if padded_size <= 64 else None,
        )  # fmt: skip

    def record_tokens(
        self,
        recorder: Recorder,
        x: Any,
        saved: Any,
        T: TensorSpec,
        y: Any,
        ridge: float,
        gain: Any = None,
        refresh: Any = None,
    ) -> None:
        """r and d of all tokens and their T [M, HV, 64, 64] from A; y where b is u."""
        grid, place = (self.M, self.HV), (saved.chunk_table, self.T, self.HV)
        S = TensorSpec((*grid, CHUNK, CHUNK), torch.float32)
        recorder.launch(
            token_products, grid, x.u, refresh, saved.A, saved.R, S, *place, K=self.K, BK=self.exact_tile,
            HEADS=self.group(x.u), PRECISION=self.precision, num_warps=4, num_stages=1,
        )  # fmt: skip
        self.record_elimination(recorder, gain, saved, S, T, ridge, CHUNK, tokens=True)
        recorder.launch(
            token_rows, grid, x.u, gain, T, saved.D, saved.R, y, *place, K=self.K, BK=self.tile(self.precision),
            HEADS=self.group(x.u), HEADS_GAIN=self.group(gain), PRECISION=self.precision, num_warps=4, num_stages=1,
        )  # fmt: skip

    def record_solve(
        self, recorder: Recorder, x: Any, saved: Any, b: Any, out: Any, precision: str, gain: Any = None, refresh: Any = None,
        scaled: bool = False,
    ) -> None:  # fmt: skip
        """out_t = A_t b_t; `scaled`: times the gain."""
        recorder.launch(
            solve_tokens, (self.M, self.HV), x.u, gain, refresh, saved.A, saved.R, saved.D, b, out, saved.chunk_table, self.T,
            self.HV, K=self.K, BK=self.tile(precision), HEADS=self.group(x.u), HEADS_GAIN=self.group(gain),
            HEADS_B=self.group(b), SCALED=scaled, PRECISION=precision, num_warps=4, num_stages=1,
        )  # fmt: skip


Results = tuple[tuple[TensorSpec | None, ...], Saved]


def shapes(x: GramInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    """y and G (None unless `final`), and what a backward needs."""
    sizes = GramSizes(x, x.G)
    table = TensorSpec((sizes.M, 2), torch.int32) if sizes.packed else None
    y = sizes.vectors(sizes.dtype if x.b is None else torch.float32)
    saved = Saved(sizes.matrices(sizes.M), sizes.vectors(), sizes.per_token(sizes.HV), table)
    return (y, sizes.matrices(sizes.N, torch.float64) if final else None), saved


def forward(recorder: Recorder, x: GramInputs, device: torch.device, options: Sequence[Any], final: bool) -> Results:
    sizes = GramSizes(x, x.G)
    (y, end), saved = shapes(x, device, options, final)
    sizes.record_table(recorder, x, saved)
    G = sizes.record_states(recorder, x, saved, (x.u, None, None, x.gain), x.G, end, back=False)
    sizes.record_elimination(recorder, x.gain, saved, G, saved.A, options[0], sizes.K)
    T = TensorSpec((sizes.M, sizes.HV, CHUNK, CHUNK), torch.float32)
    sizes.record_tokens(recorder, x, saved, T, y if x.b is None else None, options[0], x.gain)
    if x.b is not None:
        sizes.record_solve(recorder, x, saved, x.b, y, sizes.precision, x.gain)
    return (y, end), saved


def backward(
    recorder: Recorder, x: GramInputs, device: torch.device, options: Sequence[Any], saved: Saved,
    output_grads: Sequence[Any], state_grads: bool,
) -> GramInputs:  # fmt: skip
    sizes = GramSizes(x, x.G)
    dy, dG_end = output_grads
    alone = x.b is None
    adjoint, y, divisor = sizes.vectors(), saved.R, saved.D
    sizes.record_solve(
        recorder, x, saved, dy, adjoint, sizes.of_gradients, x.gain, scaled=alone and x.gain is not None
    )  # fmt: skip
    if not alone:
        y, divisor = sizes.vectors(), None
        sizes.record_solve(recorder, x, saved, x.b, y, sizes.precision, x.gain)
    dG = sizes.matrices(sizes.N, torch.float64) if state_grads else None
    H = sizes.record_states(recorder, x, saved, (adjoint, y, divisor, None), dG_end, dG, back=True)
    du = sizes.vectors(sizes.dtype)
    db = None if alone else sizes.vectors(x.b.dtype)
    dgain = None
    if x.gain is not None:
        dgain = sizes.per_token(sizes.HV, dtype=x.gain.dtype if sizes.group(x.gain) == 1 else torch.float32)
    recorder.launch(
        direction_gradients, (sizes.M, sizes.HV), x.u, x.gain, adjoint, y, divisor, H, dy, du, dgain, db, saved.chunk_table,
        sizes.T, sizes.HV, K=sizes.K, BK=sizes.tile(sizes.of_gradients), HEADS=sizes.group(x.u), HEADS_GAIN=sizes.group(x.gain),
        SELF=alone, PRECISION=sizes.of_gradients, num_warps=4 if sizes.PK <= 64 else 8, num_stages=1,
    )  # fmt: skip
    return GramInputs(du, db, dgain, dG)


# Inputs: GramInputs. Options: ridge. Outputs: y, G.
INVERSE_GRAM = Rule(shapes, forward, backward)
