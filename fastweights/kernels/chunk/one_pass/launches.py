"""The launches of a forward in one pass, and which calls take it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...common.call import Specs
from ...common.delta_rule.launches import DeltaRule
from ...common.delta_rule.sizes import segment_length
from ...common.packing import CHUNK, record_tables
from ...runtime.gluon import runs_gluon

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
    """Whether a forward that keeps nothing for a backward has these launches: wherever they were measured, they are faster."""
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
        programs = self.HV * (self.V // WHOLE.BV)
        self.length, self.cut = segment_length(self.B, self.T, programs, PROGRAMS)
        self.P = self.count_segments()
        few = not self.cut and 2 * self.N * self.HV <= PROGRAMS
        self.pass_tile = HALF if few else WHOLE

    def record_inference(self, final: bool) -> Specs:
        """The launches; o and, with final, the state after every sequence."""
        from .passes import read_chunks, summarize_chunks  # need Gluon
        from .solve import solve_chunks

        x, HV, scale = self.memory, self.HV, self.options[0]
        o, S_end = self.token_tensor(HV, self.V), self.state(self.N) if final else None
        made = self.empty(self.M, HV, RECORD)
        chunks = segments = added = transition = None
        if self.packed:
            chunks, segments = self.empty(self.M, 2, dtype=torch.int32), self.empty(self.P, 5, dtype=torch.int32)
            record_tables(self.recorder, x.cu_seqlens, chunks, segments, self.T, self.segment_tokens)
        sizes = {"H": self.H, "HV": HV, "RECORD": RECORD, "DECAY": self.decay == 1}
        self.launch(
            solve_chunks, (self.M, HV), x.q, x.k, x.beta, x.g, made, chunks, self.T, scale, **sizes,
            HEADS_G=self.group(x.g), HEADS_BETA=self.group(x.beta), num_warps=4, maxnreg=SOLVE_REGISTERS,
        )  # fmt: skip
        if self.cut:
            added, transition = self.floats(self.P, HV, self.V, self.K), self.empty(self.P, HV, self.K, self.K)
            self.launch(
                summarize_chunks, ((self.V + self.K) // HALF.BV * self.P, HV), x.k, x.v, made, added, transition, segments,
                self.T, self.segment_tokens, **sizes, BV=HALF.BV, STAGES=HALF.stages, num_warps=HALF.BV // 16,
            )  # fmt: skip
        tile = self.pass_tile
        self.launch(
            read_chunks, (self.V // tile.BV * self.P, HV), x.q, x.k, x.v, made, x.S, added, transition, o, S_end, segments,
            x.cu_seqlens, self.T, self.segment_tokens, scale, **sizes, BV=tile.BV, STARTED=x.S is not None, ENDED=final,
            CUT=bool(self.cut), STAGES=tile.stages, num_warps=tile.BV // 16,
        )  # fmt: skip
        return o, S_end
