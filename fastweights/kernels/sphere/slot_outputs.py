"""The outputs of a chunk of tokens from the steps of its slots, in parallel over chunks.

With f and w of every step known, S_t = f_t S_{t-1} + w_t h_t is linear attention whose decay differs from slot to slot and may
be 0 or negative, so that no logarithms help. What token t reads of token c is the sum over slots of q_t (f_{c+1} .. f_t) w_c.
For c and t in the two halves of a block of 2, 4, 8 or 16 tokens the product of f falls into one up to the border and one from
there, so each block size is a matrix product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import float_or_nan, is_bad, without
from .forward import EVERY, TILE
from .slot_steps import block_place, of_slots, of_steps, row, rows_of


@triton.jit
def from_border(F, token, SIZE: tl.constexpr):
    """The product of f from the first token of a token's block of SIZE up to the one before it."""
    found = tl.full(F.shape, 1.0, tl.float32)
    for t in tl.static_range(EVERY):
        if ((SIZE - 1) & t) != 0:
            found = tl.where(token == t, row(found, token, t - 1) * row(F, token, t - 1), found)
    return found


@triton.jit
def until_border(F, token, SIZE: tl.constexpr):
    """The product of f after a token up to the last token of its block of SIZE."""
    found = tl.full(F.shape, 1.0, tl.float32)
    for back in tl.static_range(EVERY):
        t = EVERY - 1 - back
        if ((SIZE - 1) & t) != SIZE - 1:
            found = tl.where(token == t, row(found, token, t + 1) * row(F, token, t + 1), found)
    return found


@triton.jit
def across_border(found, left, F, W, token, dtype: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    t, c = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
    after = (left * from_border(F, token, SIZE)).to(dtype)
    before = (W * until_border(F, token, SIZE)).to(dtype)
    joined = (t // (2 * SIZE) == c // (2 * SIZE)) & ((t & SIZE) > 0) & ((c & SIZE) == 0)
    return tl.where(joined, tl.dot(after, tl.trans(before), found, input_precision=PRECISION), found)


@triton.jit
def across_borders(found, left, F, W, token, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """To `found` [16, 16] is added for tokens t after c the sum over slots of left_t (f_{c+1} .. f_{t-1}) w_c."""
    found = across_border(found, left, F, W, token, dtype, PRECISION, 1)
    found = across_border(found, left, F, W, token, dtype, PRECISION, 2)
    found = across_border(found, left, F, W, token, dtype, PRECISION, 4)
    return across_border(found, left, F, W, token, dtype, PRECISION, 8)


@triton.jit
def load_steps(kept, turned, in_head, slot, token, K: tl.constexpr):
    """f and w of a chunk [16, TILE]; 1 and 0 where there is no token or no slot."""
    return of_steps(kept, in_head, token, slot, K, 1.0), of_steps(turned, in_head, token, slot, K, 0.0)


@triton.jit(do_not_specialize=["T"])
def read_slots(
    q, v, kept, turned, states, o, scores, blocks, T, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """v: the h of all tokens. scores [M, HV, 16, 16], kept for a backward or None: what token t reads of the h of token c."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, _, _ = block_place(blocks, m, T)
    if count > 0:
        dtype: tl.constexpr = v.dtype.element_ty
        t, c = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
        channel = tl.arange(0, BV)[None, :]
        states += (m * HV + head) * K * V
        reads = tl.zeros((EVERY, EVERY), tl.float32)
        out = tl.zeros((EVERY, BV), tl.float32)
        for part in range(0, K, TILE):
            slot = tl.multiple_of(part + tl.arange(0, TILE)[None, :], [1, 1])
            F, W = load_steps(kept, turned, m * HV + head, slot, t, K)
            query = float_or_nan(of_slots(q, first * HV + head, t, slot, count, HV, K, HEADS_K))
            state_row = part + tl.arange(0, TILE)[:, None]
            S = tl.load(states + state_row * V + channel, (state_row < K) & (channel < V), 0.0)
            after = F * query
            reads = across_borders(reads, after, F, W, t, dtype, PRECISION)
            own = tl.dot(query.to(dtype), tl.trans(W.to(dtype)), reads, input_precision=PRECISION)
            reads = tl.where(t == c, own, reads)
            from_start = (after * from_border(F, t, EVERY)).to(dtype)
            out = tl.dot(from_start, S.to(dtype), out, input_precision=PRECISION)
        reads = reads.to(dtype)
        if scores is not None:
            tl.store(scores + (m * HV + head) * EVERY * EVERY + t * EVERY + c, reads)
        h = rows_of(v, first, count, head, HV, V, BV)
        out = tl.dot(reads, without(h, is_bad(h)), out, input_precision=PRECISION)
        tl.store(
            o + (first * HV + head) * V + channel + t * (HV * V),
            out.to(o.dtype.element_ty),
            (t < count) & (channel < V),
        )
