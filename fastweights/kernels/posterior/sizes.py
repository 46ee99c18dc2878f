"""The sizes of one call, its tiles, and how its sequences are cut into segments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..chunk.sizes import CallSizes, max_pieces
from ..packing import CHUNK

MULTIPROCESSORS = 132  # of an H100 or H200
# Of a segment, and where programs read several blocks, so that there are fewer.
MIN_SEGMENT_CHUNKS, MIN_SEGMENT_CHUNKS_OF_BLOCKS = 8, 4
# Parts of key channels up to which a program that reads has registers for the loads of the next token, and parts of its tile
# then: as many blocks of columns share a token's key and query, if there are enough programs.
MOST_LOADED_AHEAD, MOST_READ, ENOUGH_PROGRAMS = 6, 18, 4 * MULTIPROCESSORS
GRAD_KEYS = 64  # key channels of a tile of M, J and their gradients, at most


class PosteriorInputs(NamedTuple):
    """Contiguous tensors as the ops take them, or placeholders. prior [HV]; M, J [N, HV, K, V] are the initial states or None;
    cu_seqlens [N+1] is on the device and never read by the host."""

    q: Any
    k: Any
    v: Any
    beta: Any
    g: Any
    prior: Any
    M: Any = None
    J: Any = None
    cu_seqlens: Any = None


def parts_of(K: int, keys: int) -> int:
    """Parts of 8 key channels in a tile: an even number, for as few tiles of at most so many channels as possible."""
    tiles = -(-K // keys)
    return -(-K // (16 * tiles)) * 2


def blocks_of(V: int, parts: int, segments: int) -> int:
    """Blocks of 16 columns per program, for so many segments and heads: as many as find registers and divide the columns."""
    blocks = -(-V // 16)
    most = MOST_READ // parts if parts <= MOST_LOADED_AHEAD else 1
    enough = (n for n in range(most, 1, -1) if blocks % n == 0 and segments * blocks // n >= ENOUGH_PROGRAMS)
    return next(enough, 1)


def programs_at_once(parts: int, back: bool = False) -> int:
    """Programs of one warp on a multiprocessor: as many as find registers. Backwards a part has twice the numbers."""
    return 8 if parts > (6 if back else 12) else 12


def registers(programs: int) -> int:
    """Of a thread, where so many programs run on a multiprocessor."""
    return min(255, 65536 // (32 * programs) // 8 * 8)


class PosteriorSizes(CallSizes):
    """M chunks and P segments, or as many numbers as those of packed sequences may take. segment: chunks per segment, None where
    no sequence is cut."""

    def __init__(self, x: PosteriorInputs, back: bool = False) -> None:
        super().__init__(x)
        # Of the parts of gradients that tiles leave, and of the states at the chunks' starts.
        self.state_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.read_parts, self.grad_parts = parts_of(self.K, self.K), parts_of(self.K, GRAD_KEYS)
        parts = self.grad_parts if back else self.read_parts
        chunks, heads = -(-self.T // CHUNK), self.B * self.HV
        most_segments = heads * max(1, chunks // MIN_SEGMENT_CHUNKS_OF_BLOCKS)
        self.read_blocks = 1 if back else blocks_of(self.V, parts, most_segments)
        shortest = MIN_SEGMENT_CHUNKS if self.read_blocks == 1 else MIN_SEGMENT_CHUNKS_OF_BLOCKS
        programs = heads * -(-self.V // (16 * self.read_blocks)) * -(-self.K // (8 * parts))
        at_once = MULTIPROCESSORS * programs_at_once(parts * self.read_blocks, back)
        wanted = max(1, at_once // max(1, programs))
        length = max(shortest, -(-chunks // wanted))
        self.segment = length if length < chunks else None
        self.segment_tokens = CHUNK * (self.segment or self.T // CHUNK + 1)
        self.M = max_pieces(self.N, self.T, CHUNK, self.packed)
        self.P = max_pieces(self.N, self.T, self.segment_tokens, self.packed, least=1)

    def heads(self, x: PosteriorInputs) -> dict[str, int]:
        """How many value heads one head of the inputs serves, and the widths, as launches take them."""
        served = {"HEADS_K": x.k, "HEADS_BETA": x.beta, "HEADS_G": x.g}
        return {name: self.group(y) for name, y in served.items()} | {"K": self.K, "V": self.V}
