"""The sizes of one call, the choices that follow from them, and the tensors that a backward needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..packing import CHUNK, record_tables
from ..runtime.launch_plan import Recorder
from ..runtime.workspace import TensorSpec
from .tiles import Tile, programs_at_once, tiles

# Below so many chunks per segment, or segments per row, finding the segments' states costs more than it saves.
MIN_SEGMENT_CHUNKS = 8
MIN_SEGMENTS = 5


class KernelInputs(NamedTuple):
    """Contiguous tensors as the ops take them, or placeholders; None where a rule lacks one. S [N, HV, K, V] and A [N, HV, K]
    are the initial states; center [HV] is of the preconditioner, or the ridge [HV, K] of its queries; cu_seqlens [N+1] is on the
    device and never read by the host. write_key_rest: what the rounding of the write keys left of them, where states are to hold
    more than that; divisor [B, T, HV] of the answers."""

    q: Any
    k: Any
    v: Any
    beta: Any = None
    g: Any = None
    write_key: Any = None
    S: Any = None
    precond_g: Any = None
    precond_beta: Any = None
    center: Any = None
    A: Any = None
    cu_seqlens: Any = None
    write_key_rest: Any = None
    divisor: Any = None


class SavedForBackward(NamedTuple):
    """T [BT, HV, 64], u [BT, HV, V], G [BT, HV], states at the segments' starts (P HV K V numbers), the segments' transitions
    (P HV K or P HV K K numbers), the preconditioner's A at the chunks' starts [M, HV, K], its write keys [BT, HV, K], and the
    tables of chunks and segments.

    None where a call has none. The three tensors of segments are there in every call, so that all sizes have as many tensors."""

    T: Any
    u: Any
    G: Any
    starts: Any
    transitions: Any
    key_energy: Any
    write_keys: Any
    chunk_table: Any
    segment_table: Any


@lru_cache
def has_large_shared_memory(device: torch.device) -> bool:
    """See `tiles`."""
    if device.type != "cuda":  # the interpreter
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 200 * 1024


def segment_length(batch: int, time: int, programs: int, wanted: int) -> tuple[int, int]:
    """Chunks per segment such that at most about `wanted` programs run, where `programs` serve one segment; and 1 where
    sequences are cut, 0 where they are enough by themselves. It depends on sizes alone, never on the lengths of packed sequences.

    In formulas without a branch: under torch.compile(dynamic=True) a branch on batch or time would take a graph of its own."""
    longest = -(-time // CHUNK)
    segments = wanted // torch.sym_max(1, programs * batch)  # per row
    length = torch.sym_max(MIN_SEGMENT_CHUNKS, -(-longest // torch.sym_max(1, segments)))
    enough = torch.sym_min(1, segments // MIN_SEGMENTS)
    several = torch.sym_min(1, torch.sym_max(0, longest - 1) // length)
    return length, enough * several


def max_pieces(count: int, time: int, tokens: int, packed: bool, least: int = 0) -> int:
    """How many numbers pieces of so many tokens take, whatever the lengths; exact where nothing is packed. least: pieces of an
    empty row. count: sequences; time: tokens per row."""
    return count + time // tokens if packed else count * torch.sym_max(least, -(-time // tokens))


class CallSizes:
    """B rows of T tokens in N sequences (each row one where nothing is packed), H key heads, HV value heads, K and V channels."""

    def __init__(self, x: Any) -> None:
        self.dtype = x.q.dtype
        self.rows = self.B, self.T = x.q.shape[:2]
        # Kernels are compiled for heads and their widths: as numbers, where torch.compile(dynamic=True) has symbols.
        self.H, self.K = map(int, x.q.shape[2:])
        self.HV, self.V = map(int, x.v.shape[2:])
        self.packed = x.cu_seqlens is not None
        self.N = x.cu_seqlens.shape[0] - 1 if self.packed else self.B
        self.precision = "tf32x3" if self.dtype == torch.float32 else "tf32"

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> TensorSpec:
        return TensorSpec(shape, dtype or self.dtype)

    def per_token(self, *shape: int, dtype: torch.dtype | None = None) -> TensorSpec:
        return self.empty(*self.rows, *shape, dtype=dtype)

    def state(self, count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return self.empty(count, self.HV, self.K, self.V, dtype=dtype)

    def group(self, x: Any) -> int:
        """How many value heads one head of x serves."""
        return 1 if x is None else self.HV // x.shape[2]


class ChunkSizes(CallSizes):
    """M chunks and P segments, or as many numbers as those of packed sequences may take. Each sequence is one segment where none
    is cut."""

    def __init__(self, x: KernelInputs, device: torch.device) -> None:
        super().__init__(x)
        self.delta, self.precond = x.beta is not None, x.precond_g is not None
        self.writes = x.write_key is not None or self.precond
        self.decay = 0 if x.g is None else x.g.ndim - 2
        self.finer = x.write_key_rest is not None
        # Without a decay, solutions as write keys forget nothing: the rounding of every segment's transition would add up.
        self.lasting = self.delta and x.write_key is not None and self.decay == 0
        self.tile = tiles(self.K, self.V, self.dtype, self.delta, has_large_shared_memory(device), self.finer)
        programs = self.HV * -(-self.V // self.tile["chunk_state"].BV)
        self.length, self.cut = segment_length(self.B, self.T, programs, programs_at_once(self.delta))
        self.M = max_pieces(self.N, self.T, CHUNK, self.packed)
        pieces = max_pieces(self.N, self.T, CHUNK * self.length, self.packed, least=1)
        self.P = self.N + self.cut * (pieces - self.N)
        # What is written to narrow states has the largest error: T and u are not rounded on the way to it.
        self.u_dtype = torch.float32 if self.K < 64 or self.finer else self.dtype

    # A launch chooses by these. `saved` must not: it is called with the symbols of torch.compile(dynamic=True) too.

    @property
    def segment(self) -> int | None:
        """Chunks per segment, None where no sequence is cut."""
        return self.length if self.cut else None

    @property
    def segment_tokens(self) -> int:
        """Tokens per segment; longer than the row where no sequence is cut, so that each has one segment."""
        return CHUNK * (self.segment or self.T // CHUNK + 1)

    def segment_table(self, saved: Any) -> TensorSpec | None:
        """Where segments lie, where that does not follow from their number."""
        return saved.segment_table if self.packed or self.cut else None

    def final_states(self, final: bool) -> tuple[TensorSpec | None, TensorSpec | None]:
        """The final S and A, where they are wanted."""
        shape = self.N, self.HV, self.K
        S = self.empty(*shape, self.V, dtype=torch.float32) if final else None
        return S, self.empty(*shape, dtype=torch.float32) if final and self.precond else None

    def saved(self) -> SavedForBackward:
        """Placeholders of what a backward needs; operands of products in the inputs' dtype."""
        HV, K, P, float32 = self.HV, self.K, self.cut * self.P, torch.float32
        transition = K * K if self.delta else K
        return SavedForBackward(
            T=self.per_token(HV, CHUNK, dtype=torch.float32 if self.finer else None) if self.delta else None,
            u=self.per_token(HV, self.V, dtype=self.u_dtype) if self.delta else None,
            G=self.per_token(HV, dtype=float32) if self.decay == 1 else None,
            starts=self.of_segments(P * HV * K * self.V, dtype=float32),
            transitions=self.of_segments(
                P * HV * transition, dtype=None if self.delta and not self.lasting else float32
            ),
            key_energy=self.empty(self.M, HV, K, dtype=float32) if self.precond else None,
            write_keys=self.per_token(HV, K) if self.precond else None,
            chunk_table=self.empty(self.M, 2, dtype=torch.int32) if self.packed else None,
            segment_table=self.of_segments(self.P if self.packed else P, 5, dtype=torch.int32),
        )

    def of_segments(self, count: int, *shape: int, dtype: torch.dtype | None) -> TensorSpec:
        """At least two, also where none are used: PyTorch takes another graph for sizes of 0 and 1."""
        return self.empty(torch.sym_max(2, count), *shape, dtype=dtype)

    def record_tables(self, recorder: Recorder, x: KernelInputs, saved: SavedForBackward) -> None:
        """The tables that the place of chunks and segments is read from, where it does not follow from their number."""
        table = self.segment_table(saved)
        if table is not None:
            record_tables(recorder, x.cu_seqlens, saved.chunk_table, table, self.T, self.segment_tokens)

    def tile_options(self, name: str, *sizes: str) -> dict[str, int]:
        return tile_options(self.tile[name], *sizes)


@lru_cache
def tile_options(tile: Tile, *sizes: str) -> dict[str, int]:
    """Those sizes of a tile, and how it is compiled, as a launch takes them."""
    chosen = {name: getattr(tile, name) for name in (*sizes, "num_warps", "num_stages", "maxnreg")}
    return {name: x for name, x in chosen.items() if x is not None}
