"""The launches of a forward in one pass, and which calls take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...common.call import Specs
from ...common.delta_rule.launches import DeltaRule
from ...common.delta_rule.sizes import SavedForBackward, segment_length
from ...common.packing import CHUNK, record_tables
from ...runtime.gluon import runs_gluon

SQUARES = 2 * CHUNK * CHUNK  # numbers of T and P in the record of a chunk
RECORD = SQUARES + 4 * CHUNK  # and two factors per token, in float32


class PassTile(NamedTuple):
    """Value columns of a program and how many chunks are there at once; 16 columns are a warp's."""

    BV: int
    stages: int


class Tiles(NamedTuple):
    """programs: how many of the pass keep the GPU busy."""

    read: PassTile
    summary: PassTile
    programs: int


TILES = Tiles(PassTile(128, 3), PassTile(64, 3), 132)
NARROW = Tiles(PassTile(64, 3), PassTile(64, 3), 132)
OPTIONS: dict[str, Any] = {}


def takes_one_pass(call: DeltaRule) -> bool:
    """Whether a forward that keeps nothing for a backward has these launches."""
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
        self.choose_tiles()

    def choose_tiles(self) -> None:
        self.tiles = OPTIONS.get("tiles", TILES)
        programs = self.HV * -(-self.V // self.tiles.read.BV)
        self.length, self.cut = segment_length(self.B, self.T, programs, self.tiles.programs)
        if not self.cut and "tiles" not in OPTIONS:
            self.tiles = NARROW
        self.P = self.count_segments()

    def forward(self, final: bool) -> Specs:
        o, S_end = self.token_tensor(self.HV, self.V), self.state(self.N) if final else None
        chunks = segments = None
        if self.packed:
            chunks, segments = self.empty(self.M, 2, dtype=torch.int32), self.empty(self.P, 5, dtype=torch.int32)
            record_tables(self.recorder, self.memory.cu_seqlens, chunks, segments, self.T, self.segment_tokens)
        self.record_passes(o, S_end, SavedForBackward(chunk_table=chunks, segment_table=segments))
        return o, S_end

    def record_passes(self, o: Any, S_end: Any, saved: SavedForBackward) -> None:
        """Of `saved` what is None is not kept."""
        from .passes import read_chunks, summarize_chunks
        from .solve import solve_chunks

        x, HV, scale = self.memory, self.HV, self.options[0]
        made = self.empty(self.M, HV, RECORD)
        segments = saved.segment_table if self.packed else None
        sizes = {"H": self.H, "HV": HV, "RECORD": RECORD, "DECAY": self.decay == 1}
        place = (segments, x.cu_seqlens, self.T, self.segment_tokens)
        self.launch(
            solve_chunks, (self.M, HV), x.q, x.k, x.beta, x.g, made, saved.T, saved.G, saved.chunk_table, self.T, scale, **sizes,
            HEADS_G=self.group(x.g), HEADS_BETA=self.group(x.beta), num_warps=4, maxnreg=OPTIONS.get("maxnreg", 128),
        )  # fmt: skip
        added = transition = None
        if self.cut:
            tile = self.tiles.summary
            added = self.floats(self.P, HV, self.V, self.K)
            transition = self.empty(self.P, HV, self.K, self.K) if saved.transitions is None else saved.transitions
            self.launch(
                summarize_chunks, ((self.V + self.K) // tile.BV * self.P, HV), x.k, x.v, made, added, transition, segments,
                self.T, self.segment_tokens, **sizes, BV=tile.BV, STAGES=tile.stages, num_warps=tile.BV // 16,
            )  # fmt: skip
        tile = self.tiles.read
        self.launch(
            read_chunks, (self.V // tile.BV * self.P, HV), x.q, x.k, x.v, made, x.S, added, transition, o, S_end, saved.u,
            saved.starts if self.cut else None, *place, scale, **sizes, BV=tile.BV, STARTED=x.S is not None,
            ENDED=S_end is not None, CUT=bool(self.cut), STAGES=tile.stages, num_warps=tile.BV // 16,
        )  # fmt: skip


class OnePassKept(OnePass):
    """A forward before a backward, whose segments are those of the kernels in plain Triton."""

    def choose_tiles(self) -> None:
        self.tiles = TILES if self.cut else NARROW

    def forward_kept(self, o: Any, S_end: Any, saved: SavedForBackward) -> None:
        self.record_tables(saved)
        self.record_passes(o, S_end, saved)
