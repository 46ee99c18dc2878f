"""Where chunks and segments lie in the tokens: small integer tables that every kernel reads its place from.

Tokens of all rows are counted through: token t of row b is b T + t. A sequence is cut into chunks of 64 tokens (the last one
may be shorter), and its chunks into segments, runs of chunks that are walked side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...ops.framework.sequences import Sequences

CHUNK = 64
FIRST, LAST = 1, 2  # a segment's place in its sequence


@dataclass(frozen=True)
class Table:
    """chunks: int32 [M, 2], first token and number of tokens. segments: int32 [P, 5], first token, token after the last,
    first chunk, sequence, and FIRST + LAST as they apply. spans: int32 [N+1], first segment of each sequence; edges: the same
    for chunks. M, P: how many there are."""

    chunks: Tensor
    segments: Tensor
    spans: Tensor
    edges: Tensor
    M: int
    P: int


# Chunks of a segment and segments of a row: below, finding the segments' states costs more than walking on.
SHORTEST = 8
WORTHWHILE = 5


def segment_length(sequences: Sequences, walks: int, wanted: int) -> int | None:
    """Chunks of a segment such that at most about `wanted` programs run, where `walks` programs serve one segment; None where
    the sequences themselves are enough. It depends on the sizes alone, so that shapes can be told without the lengths."""
    longest = -(-sequences.time // CHUNK)
    pieces = wanted // max(1, walks * sequences.batch)  # of a row
    if pieces < WORTHWHILE:
        return None
    segment = max(SHORTEST, -(-longest // pieces))
    return segment if segment < longest else None


def most_segments(sequences: Sequences, segment: int) -> int:
    """A bound on the number of segments, whatever the lengths; exact where all are equal."""
    if sequences.cu_seqlens is None:
        return sequences.batch * max(1, -(-sequences.time // (CHUNK * segment)))
    return sequences.count + sequences.time // (CHUNK * segment)


def table(sequences: Sequences, segment: int | None, device: torch.device) -> Table:
    lengths = sequences.lengths
    longest = -(-sequences.time // CHUNK)
    return _table(lengths or (sequences.time, sequences.batch), lengths is None, max(1, segment or longest), device)


@lru_cache(maxsize=64)
def _table(lengths: tuple[int, ...], uniform: bool, segment: int, device: torch.device) -> Table:
    """lengths: of every sequence, or where all are equal (length, how many)."""
    length = torch.full((lengths[1],), lengths[0]) if uniform else torch.tensor(lengths, dtype=torch.long)
    start = length.cumsum(0) - length

    def cut(tokens: int, at_least: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pieces of so many tokens: their sequence, place in it, and the first piece of every sequence."""
        counts = (-(-length // tokens)).clamp_min(at_least)
        owner = torch.arange(len(length)).repeat_interleave(counts)
        edges = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        place = torch.arange(len(owner)) - edges[owner]
        return owner, place, edges, counts

    owner, place, edges, _ = cut(CHUNK, 0)
    first = start[owner] + place * CHUNK
    chunks = torch.stack([first, torch.minimum(first + CHUNK, (start + length)[owner]) - first], 1)

    owner, place, spans, counts = cut(CHUNK * segment, 1)
    first = start[owner] + place * CHUNK * segment
    last = torch.minimum(first + CHUNK * segment, (start + length)[owner])
    ends = FIRST * (place == 0) + LAST * (place == counts[owner] - 1)
    segments = torch.stack([first, last, edges[owner] + place * segment, owner, ends], 1)
    count = len(chunks), len(segments)
    chunks, segments, spans, edges = (x.to(torch.int32).to(device) for x in (chunks, segments, spans, edges))
    return Table(chunks, segments, spans, edges, *count)
