"""The outputs of a chunk of tokens from the steps of its slots, in parallel over chunks.

With f and w of every step known, S_t = f_t S_{t-1} + w_t h_t is linear attention whose decay differs from slot to slot and may
be 0 or negative, so that no logarithms help. What token t reads of token c is the sum over slots of q_t (f_{c+1} .. f_t) w_c.
For c and t in the two halves of a block of 2, 4, 8 or 16 tokens the product of f falls into one up to the border and one from
there, so each block size is a matrix product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import is_bad, to_float_or_nan, zero_where
from .forward import EVERY, TILE
from .slot_steps import block_place, load_block_rows


@triton.jit
def operand_tile(part):
    """The tokens and slots of a tile [2, TILE // 8, 2, 8, 4] as operands of a product of 16 bits have them: token 8 i + l and
    slot 8 j + 2 m + n at [i, j, n, l, m], the lanes of a warp being the last two dimensions."""
    high, low = tl.arange(0, 2)[:, None, None, None, None], tl.arange(0, 8)[None, None, None, :, None]
    block, pair = tl.arange(0, TILE // 8)[None, :, None, None, None], tl.arange(0, 2)[None, None, :, None, None]
    group = tl.arange(0, 4)[None, None, None, None, :]
    return high * 8 + low, part + block * 8 + group * 2 + pair


@triton.jit
def make_operand(x):
    """[16, TILE] of such a tile."""
    return tl.reshape(tl.permute(x, (0, 3, 1, 4, 2)), (EVERY, TILE))


@triton.jit
def make_right_operand(x):
    """The same, [TILE, 16]; turned over by itself it would go through shared memory."""
    return tl.reshape(tl.permute(x, (1, 4, 2, 0, 3)), (TILE, EVERY))


@triton.jit
def load_operand(x, token, slot, per_token, per_slot, mask, other):
    """The offsets are called contiguous along the lanes, which they are not, so that Triton leaves every number where the tile
    has it."""
    at = tl.multiple_of(tl.max_contiguous(slot * per_slot + token * per_token, [1, 1, 1, 2, 4]), [1, 1, 1, 1, 1])
    return tl.load(x + at, mask, other)


@triton.jit
def operand_steps(
    kept, turned, first, count, m, head, token, slot, HV: tl.constexpr, K: tl.constexpr, BY_CHUNKS: tl.constexpr
):
    """f and w of chunk m, [M, HV, K, 16] by chunks and [BT, HV, K] else; 1 and 0 where there is no token or no slot."""
    at = (m * HV + head) * K * EVERY if BY_CHUNKS else (first * HV + head) * K
    inside = slot < K if BY_CHUNKS else (token < count) & (slot < K)
    PER_TOKEN: tl.constexpr = 1 if BY_CHUNKS else HV * K
    PER_SLOT: tl.constexpr = EVERY if BY_CHUNKS else 1
    return (
        load_operand(kept + at, token, slot, PER_TOKEN, PER_SLOT, inside, 1.0),
        load_operand(turned + at, token, slot, PER_TOKEN, PER_SLOT, inside, 0.0),
    )


@triton.jit
def exchange_neighbours(x, token, SIZE: tl.constexpr, dtype: tl.constexpr):
    """What token t ^ SIZE has, SIZE < 8: it lies 4 SIZE lanes away."""
    if dtype == tl.float32:
        found = tl.gather(x, tl.broadcast_to(token % 8 ^ SIZE, x.shape), 3)
    else:
        found = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, token * 0 + 4 * SIZE], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def add_pairs(found, after, before, dtype: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    """`found` [16, 16] with what tokens of the second half of a block of 2 SIZE read of those of the first."""
    t, c = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
    joined = (t // (2 * SIZE) == c // (2 * SIZE)) & ((t & SIZE) > 0) & ((c & SIZE) == 0)
    after, before = make_operand(after.to(dtype)), make_right_operand(before.to(dtype))
    return tl.where(joined, tl.dot(after, before, found, input_precision=PRECISION), found)


@triton.jit
def join_across_borders(found, after, before, F, token, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """`found` with what tokens t of the chunk read of those c before them, the sum over slots of after_t (f_{c+1} .. f_{t-1})
    before_c; and after_t times the f from the chunk's first token on, before_c times those up to its last."""
    for level in tl.static_range(3):
        found = add_pairs(found, after, before, dtype, PRECISION, 1 << level)
        # The products of f from the border to a token, and from there to the next border.
        other = exchange_neighbours(F, token, 1 << level, dtype)
        late = (token & (1 << level)) > 0
        after, before = tl.where(late, after * other, after), tl.where(late, before, before * other)
        F *= other
    found = add_pairs(found, after, before, dtype, PRECISION, 8)
    first_half = tl.sum(tl.where(token < 8, F, 0.0), 0, keep_dims=True)
    second_half = tl.sum(tl.where(token < 8, 0.0, F), 0, keep_dims=True)
    after, before = tl.where(token < 8, after, after * first_half), tl.where(token < 8, before * second_half, before)
    return found, after, before


@triton.jit(do_not_specialize=["T"])
def read_slots(
    q, v, kept, turned, states, o, scores, blocks, T, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, BY_CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """v: the h of all tokens. scores [M, HV, 16, 16], kept for a backward or None: what token t reads of the h of token c."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, _, _ = block_place(blocks, m, T)
    if count > 0:
        dtype: tl.constexpr = q.dtype.element_ty  # decode's h is in float32
        t, c = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
        channel = tl.arange(0, BV)[None, :]
        in_head = m * HV + head
        states += in_head * K * V
        reads = tl.zeros((EVERY, EVERY), tl.float32)
        out = tl.zeros((EVERY, BV), tl.float32)
        for part in range(0, K, TILE):
            token, slot = operand_tile(part)
            F, W = operand_steps(kept, turned, first, count, m, head, token, slot, HV, K, BY_CHUNKS)
            query = load_operand(
                q + (first * HV + head) // HEADS_K * K, token, slot, HV // HEADS_K * K, 1, (token < count) & (slot < K), 0.0
            )  # fmt: skip
            query = to_float_or_nan(query)
            state_row = part + tl.arange(0, TILE)[:, None]
            S = tl.load(states + state_row * V + channel, (state_row < K) & (channel < V), 0.0)
            own = tl.dot(
                make_operand(query.to(dtype)), make_right_operand(W.to(dtype)), reads, input_precision=PRECISION
            )
            reads = tl.where(t == c, own, reads)
            reads, after, before = join_across_borders(reads, F * query, W, F, token, dtype, PRECISION)
            out = tl.dot(make_operand(after.to(dtype)), S.to(dtype), out, input_precision=PRECISION)
        reads = reads.to(dtype)
        if scores is not None:
            tl.store(scores + in_head * EVERY * EVERY + t * EVERY + c, reads)
        h = load_block_rows(v, first, count, head, HV, V, BV)
        out = tl.dot(reads, zero_where(h, is_bad(h)).to(dtype), out, input_precision=PRECISION)
        tl.store(
            o + (first * HV + head) * V + channel + t * (HV * V),
            out.to(o.dtype.element_ty),
            (t < count) & (channel < V),
        )
