"""Where chunks and segments lie in the tokens.

Tokens of all rows are counted through: token t of row b is b T + t. A sequence is cut into chunks of 64 tokens (the last one
may be shorter), and its chunks into segments, runs of chunks that programs pass through in parallel.

Of rows of one length the place of a chunk follows from its number, and so does that of a sequence that is not cut into segments.
Everywhere else `write_tables` fills tables on the device, from cu_seqlens where sequences are packed: the host never reads
lengths. Pieces of L tokens (a chunk or a segment) of packed sequences are numbered without counting those before: sequence n,
which starts at token a, owns the numbers from floor(a / L) + n on. No other sequence owns these, as floor(a / L) +
ceil(length / L) <= floor((a + length) / L) + 1. Numbers that no piece has stay unused.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..runtime.launch_plan import Recorder
from ..runtime.workspace import TensorSpec

CHUNK = 64
BLOCK = 128  # table entries of one program


@triton.jit
def sequence_edges(cu_seqlens, n, T):
    """First token of packed sequence n and the token after its last, within the row whatever cu_seqlens holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int32), 0), T)
    stop = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int32), T)
    return start, tl.maximum(start, stop)


@triton.jit
def tokens_of_sequence(cu_seqlens, n, T):
    """First token of sequence n (int64) and its number of tokens."""
    if cu_seqlens is None:
        first = n.to(tl.int64) * T
        count = T
    else:
        start, stop = sequence_edges(cu_seqlens, n, T)
        first = start.to(tl.int64)
        count = stop - start
    return first, count


@triton.jit
def find_owner(cu_seqlens, number, T, N, steps, L):
    """The last sequence whose pieces of L tokens begin at or before each number, by bisection in so many steps."""
    n = number * 0
    for i in range(steps):
        later = n + (1 << (steps - 1 - i))
        start, _ = sequence_edges(cu_seqlens, tl.minimum(later, N - 1), T)
        n = tl.where((later < N) & (start // L + later <= number), later, n)
    return n


@triton.jit
def write_chunks(cu_seqlens, chunks, number, T, N, steps, M):
    n = find_owner(cu_seqlens, number, T, N, steps, 64)
    start, stop = sequence_edges(cu_seqlens, n, T)
    first = start + (number - (start // 64 + n)) * 64
    tl.store(chunks + number * 2, first, number < M)
    tl.store(chunks + number * 2 + 1, tl.minimum(tl.maximum(stop - first, 0), 64), number < M)


@triton.jit
def longest_first(length, BLOCK: tl.constexpr):
    """The places of BLOCK pieces in order of length, the longest first."""
    i = tl.arange(0, BLOCK)
    longer = length[None, :] > length[:, None]
    before = longer | ((length[None, :] == length[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    return tl.sum(tl.where(rank[:, None] == i[None, :], i[:, None], 0), 0)


@triton.jit
def write_segments(cu_seqlens, segments, number, T, N, steps, P, L, BLOCK: tl.constexpr):
    if cu_seqlens is None:
        per_row = tl.maximum(tl.cdiv(T, L), 1)
        n = number // per_row
        place = number - n * per_row
        start, stop = n * T, n * T + T
        chunk = n * tl.cdiv(T, 64) + place * (L // 64)
        turn = number
    else:
        n = find_owner(cu_seqlens, number, T, N, steps, L)
        start, stop = sequence_edges(cu_seqlens, n, T)
        place = number - (start // L + n)
        chunk = start // 64 + n + place * (L // 64)
    first = tl.minimum(start + place * L, stop)
    last = tl.minimum(first + L, stop)
    used = (place == 0) | (first < stop)
    here = number < P
    if cu_seqlens is not None:
        turn = tl.program_id(0) * BLOCK + longest_first(tl.where(here, last - first, -1), BLOCK)
    ends = tl.where(place == 0, 1, 0) + tl.where(used & (last == stop), 2, 0)
    tl.store(segments + number * 5, first, here)
    tl.store(segments + number * 5 + 1, last, here)
    tl.store(segments + number * 5 + 2, chunk, here)
    tl.store(segments + number * 5 + 3, n, here)
    tl.store(segments + number * 5 + 4, ends + 4 * turn, here)


@triton.jit(do_not_specialize=["T", "N", "steps", "M", "P", "L"])
def write_tables(cu_seqlens, chunks, segments, T, N, steps, M, P, L, BLOCK: tl.constexpr):
    """chunks [M, 2], of packed sequences alone: first token and number of tokens, 0 where no chunk has the number. segments
    [P, 5]: first token, token after the last, first chunk, sequence, and 1 for a sequence's first segment + 2 for its last; an
    empty sequence has one segment. The last number also has, times 4, the segment that is begun in this place of an order, see
    `segment_in_turn`. L: tokens per segment."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if chunks is not None:
        write_chunks(cu_seqlens, chunks, number, T, N, steps, M)
    write_segments(cu_seqlens, segments, number, T, N, steps, P, L, BLOCK)


def record_tables(
    recorder: Recorder, cu_seqlens: Any, chunks: TensorSpec | None, segments: TensorSpec, time: int, tokens: int
) -> None:
    """Fill `chunks`, where sequences are packed, and `segments`, of so many tokens each, for rows of `time` tokens."""
    N = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    M, P = 0 if chunks is None else chunks.shape[0], segments.shape[0]
    recorder.launch(
        write_tables, (-(-max(M, P) // BLOCK),), cu_seqlens, chunks, segments, time, N, max(N - 1, 0).bit_length(), M, P,
        tokens, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def chunk_place(chunks, m, T):
    """First token of chunk m (int64) and its number of tokens, 0 where no chunk has this number. chunks: the table of packed
    sequences, None for rows of T tokens."""
    if chunks is None:
        per_row = tl.cdiv(T, 64)
        row = m // per_row
        offset = (m - row * per_row) * 64
        first = (row * T + offset).to(tl.int64)
        count = tl.minimum(T - offset, 64)
    else:
        first = tl.load(chunks + 2 * m).to(tl.int64)
        count = tl.load(chunks + 2 * m + 1)
    return first, count


@triton.jit
def program_part(chunks, time, PARTS: tl.constexpr):
    """The part of a chunk's work that a program of a grid (PARTS x M, HV) has, and what `program_chunk` gives."""
    part, m, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    first, count = chunk_place(chunks, m, time)
    return part, m, head, first, count


@triton.jit
def program_chunk(chunks, time):
    """The chunk and head of a program of a grid (M, HV), the chunk's first token (int64) and its number of tokens. A kernel
    returns where there are none and computes all else afterwards: what stands before the return takes registers on sm_80."""
    m, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_place(chunks, m, time)
    return m, head, first, count


@triton.jit
def live_tokens(count):
    """The tokens of a chunk by number [64], and which of them there are."""
    i = tl.arange(0, 64)
    return i, i < count


@triton.jit
def segment_place(segments, p, T):
    """Of segment p: its first token (int64) and the token after its last, its first chunk (int64), its sequence, and whether it
    is the sequence's first and last. segments: the table, None where no row of T tokens is cut."""
    if segments is None:
        first = (p * T).to(tl.int64)
        stop = p * T + T
        chunk = (p * tl.cdiv(T, 64)).to(tl.int64)
        sequence = p
        is_first, is_last = p >= 0, p >= 0
    else:
        first = tl.load(segments + 5 * p).to(tl.int64)
        stop = tl.load(segments + 5 * p + 1)
        chunk = tl.load(segments + 5 * p + 2).to(tl.int64)
        sequence = tl.load(segments + 5 * p + 3)
        ends = tl.load(segments + 5 * p + 4)
        is_first, is_last = (ends & 1) > 0, (ends & 2) > 0
    return first, stop, chunk, sequence, is_first, is_last


@triton.jit
def segment_in_turn(segments, turn):
    """The segment of packed sequences to begin in turn: of every 128 the longest come first, as those that are begun last hold up
    the end of a launch."""
    return tl.load(segments + 5 * turn + 4) >> 2


@triton.jit
def program_segment(segments, time, LENGTH: tl.constexpr):
    """The segment of LENGTH tokens and the head of a program of a grid (P, HV), its first token (int64), its number of tokens and
    its first chunk (int64). segments: the table of packed sequences, None for rows of `time` tokens, which are cut even so."""
    p, head = tl.program_id(0), tl.program_id(1)
    if segments is None:
        per_row = tl.cdiv(time, LENGTH)
        row = p // per_row
        before = (p - row * per_row) * LENGTH
        first = (row * time + before).to(tl.int64)
        count = tl.minimum(time - before, LENGTH)
        chunk = (row * tl.cdiv(time, 64) + before // 64).to(tl.int64)
    else:
        first = tl.load(segments + 5 * p).to(tl.int64)
        count = tl.load(segments + 5 * p + 1) - tl.load(segments + 5 * p)
        chunk = tl.load(segments + 5 * p + 2).to(tl.int64)
    return p, head, first, count, chunk


@triton.jit
def pieces_of_sequence(cu_seqlens, n, T, L, LEAST: tl.constexpr):
    """Number of the first piece of L tokens of sequence n, and how many pieces it has, LEAST at least."""
    if cu_seqlens is None:
        count = tl.maximum(tl.cdiv(T, L), LEAST)
        low = n * count
    else:
        start, stop = sequence_edges(cu_seqlens, n, T)
        low = start // L + n
        count = tl.maximum(tl.cdiv(stop - start, L), LEAST)
    return low, count


@triton.jit
def pool_row(state_indices, n, P):
    """The row of sequence n in the pool of P rows, and whether it has one: none for a negative index."""
    index = n.to(tl.int64) if state_indices is None else tl.load(state_indices + n).to(tl.int64)
    return index, (index >= 0) & (index < P)
