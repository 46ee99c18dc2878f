"""Device functions that read the tokens of a head: where they lie, and their numbers as tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_address(x, t, head, HV, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the numbers of a token and head begin in x [tokens, HV // HEADS, WIDTH]."""
    return x + (t * (HV // HEADS) + head // HEADS) * WIDTH


@triton.jit
def load_gate(gate, first, live, head, HV, HEADS: tl.constexpr):
    """The numbers of a chunk's tokens [64] in float32, of a gate [BT, HV // HEADS]."""
    i = tl.arange(0, 64)
    return tl.load(gate + first * (HV // HEADS) + head // HEADS + i * (HV // HEADS), live, 0.0).to(tl.float32)


@triton.jit
def row_places(first, live, head, HV, columns, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """Where [tokens, columns] lie in a tensor [BT, HV // HEADS, WIDTH], and which of them there are."""
    i = tl.arange(0, live.shape[0])
    start = (first * (HV // HEADS) + head // HEADS) * WIDTH
    at = start + i[:, None] * (HV // HEADS * WIDTH) + columns[None, :]
    return at, live[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def load_rows(x, first, live, head, HV, columns, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """[tokens, columns] of x [BT, HV // HEADS, WIDTH] from token `first` on, of the head that serves this value head; 0 where
    a token is not live and past the last channel."""
    at, inside = row_places(first, live, head, HV, columns, WIDTH, HEADS)
    return tl.load(x + at, inside, 0.0)


@triton.jit
def tile_address(x, first, head, HV, columns, WIDTH: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr = 64):
    """Where [ROWS, columns] of x [BT, HV // HEADS, WIDTH] lie from token `first` on. The place of the first row is a scalar in
    front: with small offsets in the tile, long loops have more registers."""
    i = tl.arange(0, ROWS)
    return token_address(x, first, head, HV, HEADS, WIDTH) + i[:, None] * (HV // HEADS * WIDTH) + columns[None, :]


@triton.jit
def load_tile(x, first, here, head, HV, columns, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """The numbers there, 0 where not `here` [64, columns]."""
    return tl.load(tile_address(x, first, head, HV, columns, WIDTH, HEADS), here, 0.0)


@triton.jit
def load_state(x, rows, columns, K: tl.constexpr, V: tl.constexpr):
    """[rows, columns] of the matrix [K, V] at x, 0 where there are none."""
    return tl.load(x + rows[:, None] * V + columns[None, :], (rows < K)[:, None] & (columns < V)[None, :], 0.0)
