"""The inputs of a memory in chunks, what its backward needs, the sizes of a call and its measured tiles."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...runtime.workspace import TensorSpec
from ..call import Call, max_pieces, padded
from ..packing import CHUNK, SEGMENT_NUMBERS, record_tables

# Below so many chunks per segment, or segments per row, finding the segments' states costs more than it saves.
MIN_SEGMENT_CHUNKS = 8
MIN_SEGMENTS = 5


class KernelInputs(
    namedtuple(
        "KernelInputs",
        "q k v beta g write_key S precond_g precond_beta center A cu_seqlens write_key_rest divisor",
        defaults=(None, None, None, None, None, None, None, None, None, None, None),
    )
):
    """Contiguous tensors as the ops take them, or placeholders; None where a rule lacks one. S [N, HV, K, V] and A [N, HV, K]
    are the initial states; center [HV] is of the preconditioner, or the ridge [HV, K] of its queries; cu_seqlens [N+1] is on the
    device and never read by the host. write_key_rest: what the rounding of the write keys left of them, where states are to hold
    more than that; divisor [B, T, HV] of the answers."""


class SavedForBackward(
    namedtuple(
        "SavedForBackward",
        "T u G starts transitions key_energy write_keys chunk_table segment_table records q_decayed k_decayed w_decayed gates "
        "last_gates",
        defaults=(None, None, None, None, None, None, None, None, None, None, None, None, None, None, None),
    )
):
    """T [BT, HV, 64], u [BT, HV, V], G [BT, HV], states at the segments' starts (P HV K V numbers), the segments' transitions
    (P HV K or P HV K K numbers), the preconditioner's A at the chunks' starts [M, HV, K], its write keys [BT, HV, K], the
    tables of chunks and segments, and in the place of T and G the records of chunks [M, HV, numbers] of `chunk.one_pass`; there
    with one decay per channel also queries, keys and write keys as they decay, by how much, [BT, HV, K] each, and G at the
    chunks' ends [M, HV, K].

    None where a call has none. The three tensors of segments are there in every call, so that all sizes have as many tensors."""


class Tile(NamedTuple):
    """Key channels and value columns of a program, and how it is compiled. maxnreg: registers per thread at most, where a few
    less than the compiler would take let a multiprocessor run one more program (168 for three of 4 warps)."""

    BK: int
    BV: int
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None


def programs_at_once(delta: bool) -> int:
    """Programs of the state pass that keep an H100 or H200 (132 multiprocessors) busy."""
    return 528 if delta else 396


@lru_cache
def tiles(K: int, V: int, dtype: torch.dtype, delta: bool, large: bool = True, finer: bool = False) -> dict[str, Tile]:
    """large: whether a program may take 200 KB of shared memory (H100 and later server parts). Elsewhere the state passes load
    nothing ahead, which on sm_80 also keeps them free of spills, and other tiles are small for the same reason. finer: whether
    write keys come as two tensors and u in float32, which take room in the state passes."""
    K, V = padded(K), padded(V)
    if dtype != torch.float32:
        # Of float16 inputs the preconditioner computes in tf32, whose operands are twice as large.
        energy = 64 if large and dtype != torch.float16 else 32
        ahead = 3 if large and K <= 128 else 2 if large else 1
        fewer = 168 if delta and max(K, V) <= 128 else None
        found = {
            "wy_transform": Tile(128 if large else 64, 64, 4, 1),
            "wy_transform_again": Tile(128, 128, 4, 1),
            "chunk_state": Tile(K, 32, 4, ahead),
            "segment_states": Tile(K, 64 if large and delta and K <= 128 else 32, 4, min(ahead, 2) if delta else ahead),
            "chunk_state_backward": Tile(K, 32, 4, ahead if K <= 128 else 1),
            "combine_segments": Tile(64, 32, 4, 1),
            "chunk_output": Tile(128, 128, 4, 1) if large else Tile(64, 64, 4, 1),
            "value_grads": Tile(128, 128, 4, 1, fewer) if large else Tile(64, 32, 4, 1),
            "chunk_gradients": Tile(64, 64 if K > 64 else 32, 4, 2) if large else Tile(32, 32, 4, 2),
            "wy_transform_channel": Tile(32, 64, 4, 1) if large else Tile(16, 32, 8, 1),
            "chunk_gradients_channel": Tile(32, 32, 4, 2) if large else Tile(16, 32, 4, 2),
            "chunk_gradients_channel_halves": Tile(32, 32, 8, 1) if large else Tile(16, 32, 8, 1),
            "precondition": Tile(energy, 16, 4, 1),
            "precondition_grads": Tile(energy, 16, 4, 1),
            "key_energy_backward": Tile(energy if K > 64 else 32, 16, 4, 1),
        }
    else:
        found = {
            **dict.fromkeys(("chunk_state", "segment_states", "chunk_state_backward"), Tile(K, 16, 4, 1)),
            **dict.fromkeys(("wy_transform", "wy_transform_again", "wy_transform_channel"), Tile(32, 32, 4, 1)),
            **dict.fromkeys(("chunk_output", "value_grads"), Tile(32, 32, 4, 1)),
            **dict.fromkeys(("chunk_gradients", "chunk_gradients_channel"), Tile(32, 32, 8, 1)),
            "chunk_gradients_channel_halves": Tile(32, 32, 8, 1),
            "combine_segments": Tile(32, 16, 4, 1),
            **dict.fromkeys(("precondition", "precondition_grads", "key_energy_backward"), Tile(64, 16, 4, 1)),
        }
    found["precondition_whole"] = Tile(K, 16, 8, 1)
    if finer and large:
        found["wy_transform"] = Tile(64, 64, 4, 1)
        for name in ("chunk_state", "segment_states", "chunk_state_backward"):
            found[name] = Tile(K, 32, 4, min(2, found[name].num_stages))
        # T in float32 leaves room for one program per multiprocessor: at 64 channels one of all columns.
        found["chunk_state_backward"] = Tile(K, 64 if K <= 64 else 32, 4, 2)
        found["chunk_gradients"] = Tile(64, 32, 4, 2)
        found["chunk_output"] = Tile(128, 64, 4, 1)
        found["value_grads"] = Tile(128, 128, 4, 1)
    return {name: t._replace(BK=min(t.BK, K), BV=min(t.BV, V)) for name, t in found.items()}


def segment_length(batch: int, time: int, programs: int, wanted: int, least: int = MIN_SEGMENTS) -> tuple[int, int]:
    """The number of chunks in a segment, and whether sequences are cut (1 or 0).

    `programs` serve one segment, and at most about `wanted` shall run. Sequences are not cut where they keep the GPU busy by
    themselves, or into fewer than `least` segments. The result depends on sizes alone, never on the lengths of packed sequences.
    The formulas have no branch: under torch.compile(dynamic=True) a branch on batch or time would take a graph of its own."""
    longest = -(-time // CHUNK)
    segments = wanted // torch.sym_max(1, programs * batch)  # per row
    length = torch.sym_max(MIN_SEGMENT_CHUNKS, -(-longest // torch.sym_max(1, segments)))
    enough = torch.sym_min(1, segments // least)
    several = torch.sym_min(1, torch.sym_max(0, longest - 1) // length)
    return length, enough * several


class ChunkSizes(Call):
    """P segments, or as many numbers as those of packed sequences may take. Each sequence is one segment where none is cut."""

    def read_memory(self) -> KernelInputs:
        """The inputs of the memory: those of the call, unless another family asks it."""
        return self.x

    def find_heads(self) -> tuple[Any, Sequence[int]]:
        self.memory = self.read_memory()
        return self.memory.q, self.memory.v.shape[2:]

    def set_up(self) -> None:
        x = self.memory
        self.delta, self.precond = x.beta is not None, x.precond_g is not None
        self.writes = x.write_key is not None or self.precond
        self.decay = 0 if x.g is None else x.g.ndim - 2
        self.finer = x.write_key_rest is not None
        # Without a decay, solutions as write keys forget nothing: the rounding of every segment's transition would add up.
        self.lasting = self.delta and x.write_key is not None and self.decay == 0
        self.tile = tiles(self.K, self.V, self.dtype, self.delta, self.has_large_shared_memory, self.finer)
        programs = self.HV * -(-self.V // self.tile["chunk_state"].BV)
        self.length, self.cut = segment_length(self.B, self.T, programs, programs_at_once(self.delta))
        self.P = self.count_segments()
        # What is written to narrow states has the largest error: T and u are not rounded on the way to it.
        self.u_dtype = torch.float32 if self.K < 64 or self.finer else self.dtype
        self.constants |= {"DECAY": self.decay, "DELTA": self.delta, "WRITE": self.writes, "FINER": self.finer}
        self.constants["GOES_ON"] = False

    def count_segments(self) -> int:
        """P, from the length of segments and whether there are any."""
        pieces = max_pieces(self.N, self.T, CHUNK * self.length, self.packed, least=1)
        return self.N + self.cut * (pieces - self.N)

    # A launch chooses by these. `placeholders` must not: it is called with the symbols of torch.compile(dynamic=True) too.

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

    def placeholders(self) -> SavedForBackward:
        """Placeholders of what a backward needs; operands of products in the inputs' dtype."""
        HV, K, P, float32 = self.HV, self.K, self.cut * self.P, torch.float32
        transition = K * K if self.delta else K
        return SavedForBackward(
            T=self.token_tensor(HV, CHUNK, dtype=float32 if self.finer else None) if self.delta else None,
            u=self.token_tensor(HV, self.V, dtype=self.u_dtype) if self.delta else None,
            G=self.token_tensor(HV, dtype=float32) if self.decay == 1 else None,
            starts=self.segment_tensor(P * HV * K * self.V, dtype=float32),
            transitions=self.segment_tensor(
                P * HV * transition, dtype=None if self.delta and not self.lasting else float32
            ),
            key_energy=self.floats(self.M, HV, K) if self.precond else None,
            write_keys=self.token_tensor(HV, K) if self.precond else None,
            chunk_table=self.empty(self.M, 2, dtype=torch.int32) if self.packed else None,
            segment_table=self.segment_tensor(self.P if self.packed else P, SEGMENT_NUMBERS, dtype=torch.int32),
        )

    def segment_tensor(self, count: int, *shape: int, dtype: torch.dtype | None) -> TensorSpec:
        """At least two, also where none are used: PyTorch takes another graph for sizes of 0 and 1."""
        return self.empty(torch.sym_max(2, count), *shape, dtype=dtype)

    def record_tables(self, saved: Any) -> None:
        """Fill the tables that the place of chunks and segments is read from, where it does not follow from their number."""
        table = self.segment_table(saved)
        if table is not None:
            tokens = self.segment_tokens
            record_tables(self.recorder, self.memory.cu_seqlens, saved.chunk_table, table, self.T, tokens)

    def tile_options(self, name: str, *sizes: str) -> dict[str, int]:
        return tile_options(self.tile[name], *sizes)


@lru_cache
def tile_options(tile: Tile, *sizes: str) -> dict[str, int]:
    """Those sizes of a tile, and how it is compiled, as a launch takes them."""
    chosen = {name: getattr(tile, name) for name in (*sizes, "num_warps", "num_stages", "maxnreg")}
    return {name: x for name, x in chosen.items() if x is not None}
