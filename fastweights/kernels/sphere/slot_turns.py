"""The steps of slots whose h is known beforehand (encode, similarity): two chunks of tokens at a time, tokens across lanes.

Inside such a block of 32 tokens a slot is s = p s_0 + sum_t r_t h_t, so that its products with the h to come, b_c = s.h_c,
follow from those of s_0 and from the products of the h (`inner_products`): b_c <- f b_c + w h_t.h_c. Slots need nothing of each
other, so tiles of them are programs of their own.

Eight lanes share a slot, and each has four tokens of the block, 8 apart (four parts [SLOTS, 8]). Every lane computes the step
that its own token would make now; that of token t is final, and one shuffle each brings its f and w to the other lanes. Tokens
up to t stay as they are, so at the end of a part every lane holds f, w and b of its own token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
from .forward import EVERY, LEAST_DECAY, SHORTEST, bound_below, find_edges, inverse_square
from .layout import hide_layout
from .slot_steps import block_place, inverse_root, load_block_rows, multiply_precisely, split_in_two

PART = tl.constexpr(8)
BLOCK = tl.constexpr(32)


@triton.jit
def count_tokens_after(blocks, m, sequence, T):
    """How many tokens the chunk after number m has, 0 if m is the last of its sequence."""
    number = tl.minimum(m + 1, tl.num_programs(0) - 1)
    _, count, other, _ = block_place(blocks, number, T)
    return tl.where((number > m) & (other == sequence), count, 0)


@triton.jit(do_not_specialize=["T"])
def inner_products(v, gram, blocks, T, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """gram [M, HV, 16, 8, 4]: the products of the h of a chunk with those of tokens i + 8 j from its first on, at [.., i, j]."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, sequence, _ = block_place(blocks, m, T)
    if count > 0:
        h = load_block_rows(v, first, count, head, HV, V, BV)
        # Those of the block in the order of memory, so that the products are written in a row.
        channel, at = tl.arange(0, BV)[None, :], tl.arange(0, BLOCK)[:, None]
        token = at % 4 * PART + at // 4
        inside = (token < count + count_tokens_after(blocks, m, sequence, T)) & (channel < V)
        block = tl.load(v + (first * HV + head) * V + channel + token * (HV * V), inside, 0.0)
        place = (m * HV + head) * EVERY * BLOCK + tl.arange(0, EVERY)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(gram + place, tl.dot(h, tl.trans(block), input_precision=PRECISION))


@triton.constexpr_function
def load_words(count, offset):
    """Assembly that loads so many numbers in a row, `offset` bytes after an address."""
    results = ", ".join(f"${i}" for i in range(count))
    return f"ld.global.nc.v{count}.f32 {{{results}}}, [${count} + {offset}];"


@triton.jit
def load_gram_row(gram, t: tl.constexpr, COUNT: tl.constexpr, dtype: tl.constexpr):
    """The products of token t of a chunk with the first COUNT parts from its start on. By assembly, as the pass of Triton that
    looks for wider loads compares each load with every operation: it would take most of the time to compile. Not pure, so that
    it stays a part ahead of its use. The interpreter, which runs float32, does without."""
    place = gram + tl.arange(0, PART)[None, :] * 4
    if dtype == tl.float32:
        place += t * BLOCK
        near = tl.load(place), tl.load(place + 1)
        row = near if COUNT == 2 else (near[0], near[1], tl.load(place + 2), tl.load(place + 3))
    elif COUNT == 2:
        row = tl.inline_asm_elementwise(
            load_words(2, t * 4 * BLOCK), "=f,=f,l", [place.to(tl.int64, bitcast=True)], dtype=(tl.float32, tl.float32),
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        row = tl.inline_asm_elementwise(
            load_words(4, t * 4 * BLOCK), "=f,=f,=f,=f,l", [place.to(tl.int64, bitcast=True)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    return row


@triton.jit
def load_gram_rows(products, second, j: tl.constexpr, dtype: tl.constexpr):
    """Those of the tokens of part j of a block, whose second chunk lies `second` numbers after the first."""
    products += j // 2 * second
    rows = ()
    for i in tl.static_range(PART):
        rows += (load_gram_row(products, j % 2 * PART + i, 4 - j // 2 * 2, dtype),)  # type: ignore[assignment]
    return rows


@triton.jit
def lane_offsets(slot_offset, token_offset):
    """The sums of offsets [SLOTS, 1] and [1, 8], called contiguous, which they are not, so that the tokens of a tile get
    neighbouring lanes. Every lane loads one number, so nothing else follows."""
    return tl.multiple_of(tl.max_contiguous(slot_offset + token_offset, [1, PART]), [1, 1])


@triton.jit
def load_part(
    k, gamma, decay, gram, place, in_head, token, slot, count, HV: tl.constexpr, K: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Keys [SLOTS, 8], gamma, decay and |h|^2 [1, 8] of the tokens with these numbers in a chunk, as they are in memory."""
    there = token < count
    key = tl.load(k + place // HEADS_K * K + lane_offsets(slot, token * (HV // HEADS_K * K)), there & (slot < K), 0.0)
    gain = tl.load(gamma + place // HEADS_GAMMA + lane_offsets(place * 0, token * (HV // HEADS_GAMMA)), there, 0.0)
    d = gain
    if decay is not None:
        d = tl.load(decay + place // HEADS_DECAY + lane_offsets(place * 0, token * (HV // HEADS_DECAY)), there, 1.0)
    own = token * BLOCK + token % PART * 4 + token // PART
    square = tl.load(gram + in_head * EVERY * BLOCK + lane_offsets(place * 0, own), there, 0.0)
    return key, gain, d, square


@triton.jit
def load_chunk(
    k, gamma, decay, gram, place, in_head, token, slot, count, HV: tl.constexpr, K: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """The same of both parts of a chunk."""
    return (
        load_part(k, gamma, decay, gram, place, in_head, token, slot, count, HV, K, HEADS_K, HEADS_GAMMA, HEADS_DECAY),
        load_part(
            k, gamma, decay, gram, place, in_head, token + PART, slot, count, HV, K, HEADS_K, HEADS_GAMMA, HEADS_DECAY
        ),
    )


@triton.jit
def find_step(key, gain, d, square, b, OBJECTIVE: tl.constexpr, dtype: tl.constexpr):
    """f and w."""
    a = gain * (key - b if OBJECTIVE == "encode" else key)
    turned = a * a * tl.maximum(square - b * b, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inverse = inverse_root(d * d + turned, dtype)
    return (d - a * b) * inverse, a * inverse


@triton.jit
def share_token(x, t: tl.constexpr):
    """What a slot has for token t of a tile [SLOTS, tokens], for all its tokens: one shuffle."""
    return tl.gather(x, tl.full(x.shape, t, tl.int32), 1)


@triton.jit
def split_parts(x):
    """[SLOTS, 16] as parts [SLOTS, 8]."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, PART)), (0, 2, 1)))


@triton.jit
def join_parts(x, y):
    """[SLOTS, 2 n] of two tiles [SLOTS, n]."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def project_on_slots(S, h, dtype: tl.constexpr):
    """s.h for slots S [SLOTS, BV] in float32 and h [32, BV], in parts. The tokens are the rows of the product: elementwise work
    takes over the layout of a product that is not turned over."""
    if dtype == tl.float32:
        found = tl.dot(h, tl.trans(S), input_precision="tf32x3")
    else:
        high, rest = split_in_two(S, dtype)
        found = tl.dot(h, tl.trans(high)) - tl.dot(h, tl.trans(rest))
    pairs = tl.reshape(tl.trans(found), (S.shape[0], 2, 2 * PART))
    first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
    b0, b1 = split_parts(first)
    b2, b3 = split_parts(second)
    return b0, b1, b2, b3


@triton.jit
def move_slots(S, p, R, h, dtype: tl.constexpr):
    """p S + R^T h: the slots after tokens. p [SLOTS, 8]: the same for all tokens."""
    return tl.max(p, 1, keep_dims=True) * S + multiply_precisely(R, h, dtype)


@triton.jit
def normalize_slots(S):
    own = tl.sum(S * S, 1, keep_dims=True)
    return S * tl.where(own == 0, 0.0, tl.rsqrt(own))


@triton.jit
def load_block(
    k, v, gamma, decay, gram, place, in_head, token, slot, channel, left, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Keys, gamma, decay and |h|^2 of each of the four parts of a block, and h [32, BV]. left: tokens to the end of the
    sequence."""
    second = tl.where(left > EVERY, HV, 0)  # from the first chunk to the second, if there is one
    in_block = tl.arange(0, BLOCK)[:, None]
    h = tl.load(v + place * V + channel + in_block * (HV * V), (in_block < left) & (channel < V), 0.0)
    return (
        load_chunk(
            k, gamma, decay, gram, place, in_head, token, slot, left, HV, K, HEADS_K, HEADS_GAMMA, HEADS_DECAY
        )
        + load_chunk(
            k, gamma, decay, gram, place + EVERY * HV, in_head + second, token, slot, left - EVERY, HV, K, HEADS_K,
            HEADS_GAMMA, HEADS_DECAY,
        )
        + (h,)
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def turn_slots(
    k, v, gamma, decay, start, gram, kept, turned, along, states, first_per_square, end, grown, cu_seqlens, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The steps of a tile of slots. kept, turned, along [M, HV, K, 16]: f, w and b; 1, 0 and 0 past the last token. states
    [M, HV, K, V]: at the start of every chunk. first_per_square [N, HV, K]: 1 / n^2 of the first step. grown: see
    `has_grown`."""
    dtype: tl.constexpr = v.dtype.element_ty
    n, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop, m = find_edges(cu_seqlens, n, T)
    token = tl.arange(0, PART)[None, :]
    slot = tile * SLOTS + hide_layout(tl.arange(0, SLOTS)[:, None])
    state_row = tile * SLOTS + tl.arange(0, SLOTS)[:, None]
    channel = tl.arange(0, BV)[None, :]
    inside = (state_row < K) & (channel < V)
    in_state = state_row * V + channel
    at = (n.to(tl.int64) * HV + head) * K * V
    if start is None:
        S = tl.where((state_row == channel) & inside, 1.0, 0.0)
        length = tl.where(state_row < min(V, K), 1.0, 0.0)
    else:
        S = to_float_or_nan(tl.load(start + at + in_state, inside, 0.0))
        total = tl.sum(S * S, 1, keep_dims=True)
        unit = tl.where(total == 0, 0.0, tl.rsqrt(total))
        S *= unit
        length = total * unit
        length = tl.where((length < SHORTEST) & (total > 0), SHORTEST, length)
    per_square = inverse_square(length)
    tl.store(first_per_square + (n * HV + head) * K + state_row, per_square, state_row < K)
    zeros = tl.zeros((SLOTS, PART), tl.float32)
    alive = tl.where(length == 0, 0.0, 1.0) + zeros
    scale = tl.where(token == 0, per_square, alive)  # what the first gamma is multiplied by
    largest = zeros
    place, in_head = first * HV + head, m * HV + head
    left = (stop - first).to(tl.int32)
    blocks = tl.cdiv(left, BLOCK)
    ahead = load_block(
        k, v, gamma, decay, gram, place, in_head, token, slot, channel, left, HV, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY,
    )  # fmt: skip
    for _ in range(0, blocks):
        # The inputs of the next block, and below the products of the next part, are loaded before they are needed.
        inputs, more = ahead, tl.where(left > BLOCK, 1, 0)
        ahead = load_block(
            k, v, gamma, decay, gram, place + more * BLOCK * HV, in_head + more * 2 * HV, token, slot, channel,
            left - more * BLOCK, HV, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY,
        )  # fmt: skip
        h = inputs[4]
        second = tl.where(left > EVERY, HV, 0)  # from the first chunk to the second, if there is one
        products = gram + in_head * EVERY * BLOCK
        rows = load_gram_rows(products, second * EVERY * BLOCK, 0, dtype)
        S = normalize_slots(S)  # before b, or what its length is off by would grow from block to block
        tl.store(states + in_head * K * V + in_state, S.to(states.dtype.element_ty), inside)
        b = project_on_slots(S, h, dtype)
        R = (zeros, zeros, zeros, zeros)
        p, largest_p = zeros + 1, zeros
        p_middle, R_middle = p, zeros  # after the first chunk
        for j in tl.static_range(4):
            key, gain, d, square = inputs[j]
            key, gain = key.to(tl.float32), to_float_or_nan(gain) * (scale if j == 0 else alive)
            d = 1.0 if decay is None else bound_below(to_float_or_nan(d), LEAST_DECAY)
            here = rows
            if j < 3:  # a part ahead
                rows = load_gram_rows(products, second * EVERY * BLOCK, j + 1, dtype)
            most = (zeros, zeros, zeros, zeros)
            for i in tl.static_range(PART):
                f, w = find_step(key, gain, d, square, b[j], OBJECTIVE, dtype)
                f_t, w_t = share_token(f, i), share_token(w, i)
                row = here[i]
                for other in tl.static_range(j, 4):
                    moved = f_t * b[other] + w_t * row[other - j // 2 * 2]
                    if other == j:
                        moved = tl.where(token > i, moved, b[j])
                    b = b[:other] + (moved,) + b[other + 1 :]
                p *= f_t
                largest_p = tl.maximum(largest_p, tl.abs(p))
                for other in tl.static_range(0, j + 1):
                    r = f_t * R[other]
                    if other == j:
                        r = tl.where(token == i, w, r)
                    R = R[:other] + (r,) + R[other + 1 :]
                    most = most[:other] + (tl.maximum(most[other], tl.abs(r)),) + most[other + 1 :]
            for other in tl.static_range(0, j + 1):
                largest = tl.maximum(largest, most[other] * most[other] * inputs[other][3])
            there, stored = token < left - j * PART, (slot < K) & (left > j // 2 * EVERY)
            in_steps = (in_head + j // 2 * HV) * K * EVERY + j % 2 * PART + lane_offsets(slot * EVERY, token)
            tl.store(kept + in_steps, tl.where(there, f, 1.0), stored)
            tl.store(turned + in_steps, tl.where(there, w, 0.0), stored)
            tl.store(along + in_steps, tl.where(there, b[j], 0.0), stored)
            if j == 1:
                p_middle, R_middle = p, join_parts(R[0], R[1])
        largest = tl.maximum(largest, largest_p * largest_p)
        scale = alive
        middle = move_slots(S, p_middle, R_middle, load_block_rows(v, first, left, head, HV, V, BV), dtype)
        S = move_slots(S, p, join_parts(join_parts(R[0], R[1]), join_parts(R[2], R[3])), h, dtype)
        tl.store(
            states + (in_head + HV) * K * V + in_state, middle.to(states.dtype.element_ty), inside & (left > EVERY)
        )
        first += BLOCK
        left -= BLOCK
        place += BLOCK * HV
        in_head += 2 * HV
    tl.store(grown + (n * HV + head) * tl.num_programs(2) + tile, tl.max(largest))
    if end is not None:
        S = normalize_slots(S) * tl.where(blocks == 0, length, 1.0)
        tl.store(end + at + in_state, S, inside)
