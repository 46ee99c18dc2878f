"""Blocks of 16 tokens: the products of their keys, and how a program holds the vectors of a token."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import chunk_place
from ..common.tiles import tile_address

BLOCK = tl.constexpr(16)
AHEAD = tl.constexpr(2)  # tokens whose vectors are loaded before they are used


@triton.jit(do_not_specialize=["time"])
def key_overlaps(k, overlaps, chunks, time, H, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """overlaps [BT, H, 16]: of every key its products with the keys of its block."""
    m, block, head = tl.program_id(0) // 4, tl.program_id(0) % 4, tl.program_id(1)
    first, count = chunk_place(chunks, m, time)
    i, c = tl.arange(0, BLOCK), tl.arange(0, BK)
    live = block * BLOCK + i < count
    row = ((first + block * BLOCK) * H + head) + i * H
    keys = tl.load(k + row[:, None] * K + c[None, :], live[:, None] & (c < K)[None, :], 0.0)
    found = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    tl.store(overlaps + row[:, None] * BLOCK + i[None, :], found, live[:, None])


@triton.jit
def lay_out_channels(LANES: tl.constexpr, COPIES: tl.constexpr, EACH: tl.constexpr):
    """The channel of every number of a vector [LANES, COPIES, EACH], and the copy. Every warp holds all channels, so that a sum
    over them waits for no other warp."""
    lane, copy, each = tl.arange(0, LANES)[:, None, None], tl.arange(0, COPIES)[None, :, None], tl.arange(0, EACH)
    channel = lane * EACH + each[None, None, :]
    return channel + 0 * copy, copy + 0 * channel


@triton.jit
def sum_over_channels(x):
    return tl.sum(tl.sum(x, 2, keep_dims=True), 0, keep_dims=True)


@triton.jit
def load_keys(k, t, stop, head, HV, K: tl.constexpr, PK: tl.constexpr, HEADS_K: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, PK] of keys or queries from token t on."""
    i, c = tl.arange(0, ROWS), tl.arange(0, PK)
    inside = ((t + i < stop) & (t >= 0))[:, None] & (c < K)[None, :]
    return tl.load(tile_address(k, t, head, HV, c, K, HEADS_K, ROWS), inside, 0.0)


@triton.jit
def load_values(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, PV] of a tensor [BT, HV, V] from token t on."""
    i, j = tl.arange(0, ROWS), tl.arange(0, PV)
    inside = (t + i < stop)[:, None] & (j < V)[None, :]
    return tl.load(x + (t * HV + head) * V + i[:, None] * (HV * V) + j[None, :], inside, 0.0)


@triton.jit
def load_overlaps(
    overlaps, t, here, head, HV, begin, i: tl.constexpr, PART: tl.constexpr, BACK: tl.constexpr, HEADS_K: tl.constexpr
):
    """The products of key t with the keys whose turn in the block comes before its own, the last BLOCK - PART before its part
    and those of the part; 0 where the block has no such turn. Its own turn is i in the part that begins at turn `begin`, or
    beyond, in the next part. BACK: turns count from the block's last token."""
    row = overlaps + (t * (HV // HEADS_K) + head // HEADS_K) * BLOCK
    found = ()
    for j in tl.static_range(BLOCK - PART + i % PART):
        first_of_part = begin + (i // PART + 1 + j // PART) * PART - BLOCK
        turn = first_of_part + j % PART
        found += (tl.load(row + (BLOCK - 1 - turn if BACK else turn), here & (first_of_part >= 0), 0.0),)
    return found


@triton.jit
def store_transposed(to, S, K: tl.constexpr, V: tl.constexpr):
    """S [PV, PK] into a matrix [K, V]."""
    j, c = tl.arange(0, S.shape[0]), tl.arange(0, S.shape[1])
    tl.store(to + c[None, :] * V + j[:, None], S.to(to.dtype.element_ty), (j < V)[:, None] & (c < K)[None, :])


@triton.jit
def load_transposed(source, K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr):
    """[PV, PK] in float32 from a matrix [K, V]."""
    j, c = tl.arange(0, PV), tl.arange(0, PK)
    return tl.load(source + c[None, :] * V + j[:, None], (j < V)[:, None] & (c < K)[None, :], 0.0).to(tl.float32)
