"""Palimpsa by kernels: the sizes and tiles of a call, how its sequences are cut into segments, and the launches."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from ..common.call import MULTIPROCESSORS, Call, Specs, make_rule, max_pieces, padded
from ..common.packing import CHUNK, record_tables
from ..runtime.workspace import TensorSpec
from .gradients import posterior_gradients
from .read import read_posterior, segment_gradients
from .state import posterior_state

MIN_SEGMENT_CHUNKS = 4  # the fewest of a segment
# Parts of key channels up to which a program that reads has registers for the loads of the next token, and parts of its tile
# then: as many blocks of columns share a token's key and query, if there are enough programs.
MOST_LOADED_AHEAD, MOST_READ, ENOUGH_PROGRAMS = 6, 18, 4 * MULTIPROCESSORS
GRAD_KEYS = 64  # key channels of a tile of M, J and their gradients, at most
SUM_KEYS = 32  # the same where a segment's tokens are summed up, of which first segments have no need, or where it spares cutting


class PosteriorInputs(namedtuple("PosteriorInputs", "q k v beta g prior M J cu_seqlens", defaults=(None, None, None))):
    """Contiguous tensors as the ops take them, or placeholders. prior [HV]; M, J [N, HV, K, V] are the initial states or None;
    cu_seqlens [N+1] is on the device and never read by the host."""


class Segments(namedtuple("Segments", "states transition table", defaults=(None, None, None))):
    """Where sequences are cut: a state per segment, M and J [P, HV, K, V], and the segments' log decays [P, HV, K]; the table
    of segments. None where there is none."""


def count_parts(K: int, keys: int) -> int:
    """Parts of 8 key channels in a tile: an even number, for as few tiles of at most so many channels as possible."""
    tiles = -(-K // keys)
    return -(-K // (16 * tiles)) * 2


def count_blocks(V: int, parts: int, segments: int) -> int:
    """Blocks of 16 columns per program, for so many segments and heads: as many as find registers and divide the columns."""
    blocks = -(-V // 16)
    most = MOST_READ // parts if parts <= MOST_LOADED_AHEAD else 1
    enough = (n for n in range(most, 1, -1) if blocks % n == 0 and segments * blocks // n >= ENOUGH_PROGRAMS)
    return next(enough, 1)


def programs_at_once(parts: int, back: bool = False) -> int:
    """Programs of one warp on a multiprocessor: as many as find registers. Backwards a part has twice the numbers."""
    return 8 if parts > (6 if back else 12) else 12


def registers(programs: int) -> int:
    """The registers of a thread where so many programs run on a multiprocessor."""
    return min(255, 65536 // (32 * programs) // 8 * 8)


class Posterior(Call):
    """P segments, or as many numbers as those of packed sequences may take. Options: scale of q, whether the variance is an
    output. Outputs: o, (the variance,) M, J, these None unless they are wanted. A backward needs the inputs alone."""

    def shapes(self, final: bool) -> tuple[Specs, Specs]:
        _, variance = self.options
        outputs = [self.token_tensor(self.HV, self.V, dtype=self.x.v.dtype) for _ in range(2 if variance else 1)]
        return (*outputs, *(self.state(self.N) if final else None for _ in range(2))), ()

    def set_up(self) -> None:
        x = self.x
        self.constants |= {"HEADS_K": self.group(x.k), "HEADS_BETA": self.group(x.beta), "HEADS_G": self.group(x.g)}

    def choose_tiles(self, back: bool) -> None:
        """`segment`: chunks per segment, None where no sequence is cut. Not part of __init__, as it branches on lengths: `shapes`
        is called with the symbols of torch.compile(dynamic=True) too."""
        # Of the parts of gradients that tiles leave, and of the states at the chunks' starts.
        self.state_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        chunks, heads = -(-self.T // CHUNK), self.B * self.HV
        self.parts = count_parts(self.K, GRAD_KEYS if back else self.K)
        self.blocks = 1 if back else count_blocks(self.V, self.parts, heads * max(1, chunks // MIN_SEGMENT_CHUNKS))
        length = self.segment_length(chunks, heads, self.parts, back)
        narrow = count_parts(self.K, SUM_KEYS)
        # A cut costs `segment_gradients`, more than what narrower tiles repeat.
        if back and length < chunks <= self.segment_length(chunks, heads, narrow, back):
            self.parts, length = narrow, chunks
        self.segment = length if length < chunks else None
        self.segment_tokens = CHUNK * (self.segment or self.T // CHUNK + 1)
        self.P = max_pieces(self.N, self.T, self.segment_tokens, self.packed, least=1)

    def segment_length(self, chunks: int, heads: int, parts: int, back: bool) -> int:
        """Chunks per segment: so few that all programs of a wave have work."""
        programs = heads * -(-self.V // (16 * self.blocks)) * -(-self.K // (8 * parts))
        wanted = max(1, MULTIPROCESSORS * programs_at_once(parts * self.blocks, back) // max(1, programs))
        return max(MIN_SEGMENT_CHUNKS, -(-chunks // wanted))

    def record_segments(self) -> Segments:
        """The tables, and the states that segments start from: in parallel what each adds, then one sum over the segments."""
        found = Segments()
        if self.packed or self.segment is not None:
            chunks = self.empty(self.M, 2, dtype=torch.int32) if self.packed else None
            table = self.empty(self.P, 5, dtype=torch.int32)
            record_tables(self.recorder, self.x.cu_seqlens, chunks, table, self.T, self.segment_tokens)
            found = Segments(table=table)
        if self.segment is not None:
            states = self.state(self.P), self.state(self.P)
            found = found._replace(states=states, transition=self.floats(self.P, self.HV, self.K))
            self.record_states(found, (None, None), states, summary=True)
            for added, begin in zip(states, (self.x.M, self.x.J)):
                self.join_states(found, added, begin, back=False)
        return found

    def record_states(self, segments: Segments, start: Sequence[Any], out: Sequence[TensorSpec], summary: bool) -> None:
        """The states at the chunks' ends from those at the segments' starts; with `summary` what every segment adds to them."""
        x, width = self.x, min(32 if self.dtype == torch.bfloat16 else 16, padded(self.V))
        self.launch(
            posterior_state, (-(-self.V // width) * self.P, self.HV), x.k, x.v, x.beta, x.g, *start, *out, segments.transition,
            segments.table, self.T, self.HV, BV=width, STARTED=start[0] is not None, SUMMARY=summary, num_warps=4,
        )  # fmt: skip

    def join_states(self, segments: Segments, added: TensorSpec, begin: Any, back: bool) -> None:
        tile = {"BK": padded(self.K), "BV": min(32, padded(self.V)), "num_warps": 4}
        self.join_segments(added, segments.transition, begin, self.segment_tokens, back, False, self.precision, tile)

    def forward(self, final: bool) -> tuple[Specs, Specs]:
        x, (scale, variance) = self.x, self.options
        self.choose_tiles(back=False)
        outputs, saved = self.shapes(final)
        segments = self.record_segments()
        start = segments.states or (x.M, x.J)
        started = start[0] is not None
        self.launch(
            read_posterior, (-(-self.V // (16 * self.blocks)) * self.P, self.HV),
            x.q, x.k, x.v, x.beta, x.g, x.prior, *(start if started else (x.prior, x.prior)), outputs[0],
            outputs[1] if variance else None, *outputs[-2:], segments.table, self.T, int(started), scale, self.HV,
            PARTS=self.parts, ENDED=final, VARIANCE=variance, LOADS_AHEAD=self.parts <= MOST_LOADED_AHEAD,
            BLOCKS=self.blocks, num_warps=1, maxnreg=registers(programs_at_once(self.parts * self.blocks)),
        )  # fmt: skip
        return outputs, saved

    def backward(self, saved: Specs, output_grads: Sequence[Any], state_grads: bool) -> PosteriorInputs:
        x, (scale, variance), HV, K, V = self.x, self.options, self.HV, self.K, self.V
        self.choose_tiles(back=True)
        segments = self.record_segments()
        do, *rest = output_grads
        dw, d_end = rest[0] if variance else None, rest[-2:]
        start = segments.states or (x.M, x.J)
        chunk_states = [self.state(self.M, dtype=self.state_dtype) for _ in range(2)]
        self.record_states(segments, start, chunk_states, summary=False)
        v_tiles, k_tiles = -(-V // 16), -(-K // (8 * self.parts))
        programs = v_tiles * k_tiles * self.P
        inputs = x.q, x.k, x.v, x.beta, x.g, x.prior
        constants = {"PARTS": self.parts, "VARIANCE": dw is not None, "num_warps": 1}
        if self.segment is not None:
            added, sum_parts = [self.state(self.P) for _ in range(2)], count_parts(K, SUM_KEYS)
            self.launch(
                segment_gradients, (v_tiles * -(-K // (8 * sum_parts)) * self.P, HV), *inputs, *start, do, dw, *added,
                segments.table, self.T, scale, HV, **constants | {"PARTS": sum_parts},
            )  # fmt: skip
            for d_state, begin in zip(added, d_end):
                self.join_states(segments, d_state, begin, back=True)
            d_end = added

        scratch = [self.floats(programs * HV, 128 * self.parts) for _ in range(2)]
        grads = {
            "dq": self.token_tensor(HV, K), "dk": self.token_tensor(HV, K), "dv": self.token_tensor(HV, V, dtype=x.v.dtype),
            "dbeta": self.token_tensor(HV, V, dtype=x.beta.dtype), "dg": self.token_tensor(HV, dtype=x.g.dtype),
            "dprior": self.empty(HV, dtype=x.prior.dtype),
        }  # fmt: skip
        parts = {
            **self.tile_parts(v_tiles, dq=grads["dq"], dk=grads["dk"]),
            **self.tile_parts(k_tiles, dv=grads["dv"], dbeta=grads["dbeta"]),
            "dg": self.floats(v_tiles * k_tiles, self.B * self.T * HV),
            "dprior": self.floats(programs, HV),
        }
        wanted = state_grads and x.M is not None
        d_start = [self.state(self.N) if wanted else None for _ in range(2)]
        given = [x.prior if y is None else y for y in d_end]  # a pointer in the place of what is not read
        self.launch(
            posterior_gradients, (programs, HV), *inputs, *chunk_states, do, dw, *given, *scratch, *parts.values(), *d_start,
            segments.table, self.T, self.B * self.T, scale, HV, **constants, GIVEN_M=d_end[0] is not None,
            GIVEN_J=d_end[1] is not None, ENDED=wanted, maxnreg=registers(programs_at_once(self.parts, back=True)),
        )  # fmt: skip
        for name, out in grads.items():
            if parts[name] is not out:
                self.sum_tiles(parts[name], out)
        return PosteriorInputs(*grads.values(), *d_start)

    def tile_parts(self, tiles: int, **outs: TensorSpec) -> dict[str, TensorSpec]:
        """Where every tile leaves its parts of two gradients, of one dtype: in the gradients where there is one tile."""
        if tiles == 1 and len({out.dtype for out in outs.values()}) == 1:
            return outs
        return {name: TensorSpec((tiles, *out.shape), self.state_dtype) for name, out in outs.items()}


POSTERIOR = make_rule(Posterior)
