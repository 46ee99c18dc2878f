"""The sizes of one call, its tiles, and how its sequences are cut into segments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..chunk.sizes import CallSizes, max_pieces
from ..chunk.tiles import padded
from ..packing import CHUNK

MULTIPROCESSORS = 132  # of an H100 or H200
# Programs per multiprocessor up to which sequences are cut on the way back.
PROGRAMS_BACK = 7
MIN_SEGMENT_CHUNKS = 8
# Elements of M and J that a warp's registers hold, and those with their gradients besides; key channels of the latter.
READ_ELEMENTS, GRAD_ELEMENTS, GRAD_KEYS = 2048, 1536, 96


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


class Tile(NamedTuple):
    """Key channels of one part, parts, and value columns of a program. A vector of 16 channels is less than one number per
    thread: Triton then loads it where it is used, and no thread waits for others."""

    P: int
    PARTS: int
    BV: int

    @property
    def programs(self) -> int:
        """Programs of one warp on a multiprocessor that steps forwards: as many as find registers."""
        per_thread = self.P * self.PARTS * self.BV // 32
        return 8 if per_thread > 48 else 12 if per_thread > 24 else 24


def tile_of(K: int, V: int, keys: int, elements: int) -> Tile:
    """A tile of at most about so many key channels, and of so many elements of M and J where it has more than 4 columns."""
    P = min(16, padded(K, 1))
    parts = -(-K // P)
    parts = -(-parts // -(-K // keys))
    BV = min(16, padded(V, 4))
    while BV > 4 and P * parts * BV > elements:
        BV //= 2
    return Tile(P, parts, BV)


class PosteriorSizes(CallSizes):
    """M chunks and P segments, or as many numbers as those of packed sequences may take. segment: chunks per segment, None where
    no sequence is cut."""

    def __init__(self, x: PosteriorInputs, back: bool = False) -> None:
        super().__init__(x)
        # The states at the chunks' starts; squares of keys leave the range of float16.
        self.state_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.read_tile = tile_of(self.K, self.V, self.K, READ_ELEMENTS)
        self.segment_grad_tile = tile_of(self.K, self.V, self.K, GRAD_ELEMENTS)
        self.grad_tile = tile_of(self.K, self.V, GRAD_KEYS, GRAD_ELEMENTS)
        tile = self.grad_tile if back else self.read_tile
        programs = self.B * self.HV * -(-self.V // tile.BV) * -(-self.K // (tile.P * tile.PARTS))
        at_once = MULTIPROCESSORS * (PROGRAMS_BACK if back else tile.programs)
        chunks, wanted = -(-self.T // CHUNK), max(1, at_once // max(1, programs))
        length = max(MIN_SEGMENT_CHUNKS, -(-chunks // wanted))
        self.segment = length if length < chunks else None
        self.segment_tokens = CHUNK * (self.segment or self.T // CHUNK + 1)
        self.M = max_pieces(self.N, self.T, CHUNK, self.packed)
        self.P = max_pieces(self.N, self.T, self.segment_tokens, self.packed, least=1)

    def heads(self, x: PosteriorInputs) -> dict[str, int]:
        """How many value heads one head of the inputs serves, and the widths, as launches take them."""
        served = {"HEADS_K": x.k, "HEADS_BETA": x.beta, "HEADS_G": x.g}
        return {name: self.group(y) for name, y in served.items()} | {"K": self.K, "V": self.V}
