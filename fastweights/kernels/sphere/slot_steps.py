"""The steps of slots whose h is known beforehand (encode, similarity): a chunk of tokens as coefficients.

Inside a chunk a slot is s = p s_0 + sum_t r_t h_t, so that its products with the h to come, b_c = s.h_c, follow from those of
s_0 and from the products of the h (`inner_products`): b_c <- f b_c + w h_t.h_c. A thread owns a slot, and the chunk's tokens lie
in its registers. Slots need nothing of each other, so tiles of them are programs of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import float_or_nan, prefetch
from .forward import EVERY, LEAST_DECAY, SHORTEST, TILE, edges, inverse_square, not_below


@triton.jit
def block_place(blocks, m, T):
    """Of the 16 tokens number m: the first (int64), how many there are, their sequence (int64), and whether they are its first.
    blocks: the table of packed sequences or None."""
    if blocks is None:
        per_row = tl.cdiv(T, EVERY)
        row = m // per_row
        offset = (m - row * per_row) * EVERY
        sequence, is_first = row.to(tl.int64), offset == 0
        first = sequence * T + offset
        count = tl.minimum(T - offset, EVERY)
    else:
        first = tl.load(blocks + 5 * m).to(tl.int64)
        count = tl.load(blocks + 5 * m + 1) - first.to(tl.int32)
        sequence = tl.load(blocks + 5 * m + 3).to(tl.int64)
        is_first = (tl.load(blocks + 5 * m + 4) & 1) > 0
    return first, count, sequence, is_first


@triton.jit
def rows_of(x, first, count, head, HV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A chunk's vectors [16, BLOCK] of x [BT, HV, WIDTH], 0 past the last token."""
    token, channel = tl.arange(0, EVERY)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = token < count if WIDTH == BLOCK else (token < count) & (channel < WIDTH)
    return tl.load(x + (first * HV + head) * WIDTH + channel + token * (HV * WIDTH), inside, 0.0)


@triton.jit(do_not_specialize=["T"])
def inner_products(v, gram, blocks, T, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """gram [M, HV, 16, 16]: the products of the h of a chunk."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, _, _ = block_place(blocks, m, T)
    if count > 0:
        h = rows_of(v, first, count, head, HV, V, BV)
        token, other = tl.arange(0, EVERY)[:, None], tl.arange(0, EVERY)[None, :]
        products = tl.dot(h, tl.trans(h), input_precision=PRECISION)
        tl.store(gram + (m * HV + head) * EVERY * EVERY + token * EVERY + other, products)


@triton.jit
def row(tile, token, t: tl.constexpr):
    """Row t [1, n] of a tile [16, n] whose rows are registers of a thread: no instruction is left of it."""
    found = tl.sum(tl.where(token == t, tile.to(tl.int32, bitcast=True), 0), 0, keep_dims=True)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def inverse_root(x, dtype: tl.constexpr):
    """The hardware's own, to 2^-22, unless the inputs are float32."""
    if dtype == tl.float32:
        found = tl.rsqrt(x)
    else:
        found = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def product(a, b, dtype: tl.constexpr):
    """a b of float32 numbers a and of numbers b in the inputs' dtype, a to twice the digits of that dtype."""
    if dtype == tl.float32:
        found = tl.dot(a, b, input_precision="tf32x3")
    else:
        if dtype == tl.bfloat16:  # cut off, not rounded: rounding one number at a time is slow
            bits = a.to(tl.int32, bitcast=True)
            high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            rest = (bits & -65536).to(tl.float32, bitcast=True) - a
        else:
            high = a.to(dtype)
            rest = high.to(tl.float32) - a
        if b.shape[1] < a.shape[1]:  # the sign is turned over where there are fewer numbers
            found = tl.dot(high, b) - tl.dot(rest.to(dtype), b)
        else:
            found = tl.dot((-rest).to(dtype), b, tl.dot(high, b))
    return found


@triton.jit
def is_there(token, slot, count, K: tl.constexpr):
    """Which of a chunk's numbers of slots [16, TILE] there are."""
    return (token < count) & (slot >= 0) if ((TILE - 1) & K) == 0 else (token < count) & (slot < K)


@triton.jit
def of_slots(x, place, token, slot, count, HV: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr):
    """A chunk's numbers of slots [16, TILE], of x [BT, HV // HEADS, K], as they are in memory."""
    return tl.load(x + place // HEADS * K + slot + token * (HV // HEADS * K), is_there(token, slot, count, K), 0.0)


@triton.jit
def step_places(in_head, token, slot, K: tl.constexpr):
    """Where the steps of a chunk are in an array [M, HV, K, 16]. in_head: the chunk's number times HV + head. Slots are called
    contiguous, which they are not, so that tiles of slots keep their layout; at a divisibility of 1 nothing else follows."""
    in_chunk = tl.multiple_of(tl.max_contiguous(slot * EVERY, [1, TILE]), [1, 1])
    return in_head * K * EVERY + in_chunk + token


@triton.jit
def of_steps(x, in_head, token, slot, K: tl.constexpr, other):
    """The steps of a chunk [16, TILE], of x [M, HV, K, 16]."""
    return tl.load(x + step_places(in_head, token, slot, K), slot < K, other)


@triton.jit
def of_tokens(x, place, token, count, HV: tl.constexpr, HEADS: tl.constexpr, other):
    """A chunk's numbers [16, 1] of x [BT, HV // HEADS], as they are in memory."""
    return tl.load(x + place // HEADS + token * (HV // HEADS), token < count, other)


@triton.jit
def fetch_rows(x, last, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Fetch rows of WIDTH numbers from x on, STRIDE apart, those after row `last` left out, into the L1 cache, 32 bytes per
    thread. Inputs in float32, which the interpreter runs too, do without."""
    if dtype != tl.float32:
        PIECE: tl.constexpr = 32 // (x.dtype.element_ty.primitive_bitwidth // 8)
        PIECES: tl.constexpr = triton.next_power_of_2((WIDTH + PIECE - 1) // PIECE)
        number = tl.minimum(tl.arange(0, PIECES)[None, :] * PIECE, WIDTH - 1)
        place = x + tl.minimum(tl.arange(0, ROWS)[:, None], last) * STRIDE + number
        prefetch(place.to(tl.int64, bitcast=True))


@triton.jit
def fetch_of_slots(x, place, part, last, HV: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, dtype: tl.constexpr):
    """The same for a chunk's numbers of a tile of slots."""
    WIDTH: tl.constexpr = min(TILE, K)
    fetch_rows(x + place // HEADS * K + tl.minimum(part * TILE, K - WIDTH), last, HV // HEADS * K, EVERY, WIDTH, dtype)


@triton.jit
def fetch_steps(x, in_head, part, K: tl.constexpr, dtype: tl.constexpr):
    """The same for the steps of a tile of slots."""
    SIZE: tl.constexpr = min(TILE, K) * EVERY
    fetch_rows(
        x + tl.minimum((in_head * K + part * TILE) * EVERY, (in_head + 1) * K * EVERY - SIZE), 0, 0, 1, SIZE, dtype
    )


@triton.jit
def steps_inputs(
    k, gamma, decay, place, token, slot, count, HV: tl.constexpr, K: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    key = of_slots(k, place, token, slot, count, HV, K, HEADS_K)
    gain = of_tokens(gamma, place, token, count, HV, HEADS_GAMMA, 0.0)
    kept = gain if decay is None else of_tokens(decay, place, token, count, HV, HEADS_DECAY, 1.0)
    return key, gain, kept


@triton.jit(do_not_specialize=["T"])
def turn_slots(
    k, v, gamma, decay, start, gram, kept, turned, along, states, first_per_square, end, grown, cu_seqlens, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """The steps of a tile of slots, chunk after chunk. kept, turned, along [M, HV, K, 16]: f, w and b; 1, 0 and 0
    past the last token. states [M, HV, K, V]: at the
    start of every chunk. first_per_square [N, HV, K]: 1 / n^2 of the first step. grown: see `has_grown`."""
    dtype: tl.constexpr = v.dtype.element_ty
    n, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop, m = edges(cu_seqlens, n, T)
    # A thread has a slot, and a chunk's tokens in its registers: the layout that Triton gives to a tile [16, 32] of one warp
    # whose loads it may not widen (they might be unaligned, for all it knows).
    token = tl.arange(0, EVERY)[:, None]
    slot = tl.multiple_of(part * TILE + tl.arange(0, TILE)[None, :], [1, 1])
    state_row = part * TILE + tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, BV)[None, :]
    inside = (state_row < K) & (channel < V)
    in_state = state_row * V + channel
    at = (n.to(tl.int64) * HV + head) * K * V
    if start is None:
        S = tl.where((state_row == channel) & inside, 1.0, 0.0)
        length = tl.where(state_row < min(V, K), 1.0, 0.0)
    else:
        S = float_or_nan(tl.load(start + at + in_state, inside, 0.0))
        square = tl.sum(S * S, 1, keep_dims=True)
        unit = tl.where(square == 0, 0.0, tl.rsqrt(square))
        S *= unit
        length = square * unit
        length = tl.where((length < SHORTEST) & (square > 0), SHORTEST, length)
    length = tl.trans(length)
    alive = tl.where(length == 0, 0.0, 1.0)
    per_square = inverse_square(length)
    tl.store(first_per_square + (n * HV + head) * K + slot, per_square, slot < K)
    most = alive
    place = first * HV + head
    blocks = tl.cdiv((stop - first).to(tl.int32), EVERY)
    left = (stop - first).to(tl.int32)
    for _ in range(0, blocks):
        more = tl.where(left > EVERY, 1, 0)  # the next chunk is fetched while this one is computed
        step = more * EVERY
        last = tl.minimum(left - step, EVERY) - 1
        fetch_rows(v + (place + step * HV) * V, last, HV * V, EVERY, V, dtype)
        fetch_of_slots(k, place + step * HV, part, last, HV, K, HEADS_K, dtype)
        fetch_rows(gamma + (place + step * HV) // HEADS_GAMMA, last, HV // HEADS_GAMMA, EVERY, 1, dtype)
        if decay is not None:
            fetch_rows(decay + (place + step * HV) // HEADS_DECAY, last, HV // HEADS_DECAY, EVERY, 1, dtype)
        fetch_rows(gram + ((m + more) * HV + head) * EVERY * EVERY, 0, 0, 1, EVERY * EVERY, dtype)
        h = rows_of(v, first, left, head, HV, V, BV)
        tl.store(states + (m * HV + head) * K * V + in_state, S.to(states.dtype.element_ty), inside)
        b = tl.trans(product(S, tl.trans(h), dtype))
        key, gain, d = steps_inputs(k, gamma, decay, place, token, slot, left, HV, K, HEADS_K, HEADS_GAMMA, HEADS_DECAY)
        key, gain = key.to(tl.float32), tl.broadcast_to(float_or_nan(gain), (EVERY, TILE))
        if decay is not None:
            d = tl.broadcast_to(not_below(float_or_nan(d), LEAST_DECAY), (EVERY, TILE))
        # The layout of b is that of what was loaded last; else it would stay that of a product, whose rows lie across threads.
        b = tl.where(token < left, b, key)
        F = tl.zeros((EVERY, TILE), tl.float32)
        R, W, along_h = F, F, F
        growth = alive
        for t in tl.static_range(EVERY):
            overlap = tl.broadcast_to(
                tl.load(gram + (m * HV + head) * EVERY * EVERY + t * EVERY + token), (EVERY, TILE)
            )
            square_t = row(overlap, token, t)
            gain_t, b_t, key_t = row(gain, token, t), row(b, token, t), row(key, token, t)
            a = gain_t * per_square * (key_t - b_t if OBJECTIVE == "encode" else key_t)
            turned_by = a * a * tl.maximum(square_t - b_t * b_t, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if decay is None:
                inverse = inverse_root(1 + turned_by, dtype)
                f = (1 - a * b_t) * inverse
            else:
                d_t = row(d, token, t)
                inverse = inverse_root(d_t * d_t + turned_by, dtype)
                f = (d_t - a * b_t) * inverse
            w = a * inverse
            now = token == t
            F, W, along_h = tl.where(now, f, F), tl.where(now, w, W), tl.where(now, b_t, along_h)
            b = f * b + w * overlap
            growth = tl.maximum(f * f * growth, w * w * square_t)
            most = tl.maximum(most, growth)
            per_square = alive
        to_end = tl.full((1, TILE), 1.0, tl.float32)
        for back in tl.static_range(EVERY):
            R = tl.where(token == EVERY - 1 - back, to_end * W, R)
            to_end *= row(F, token, EVERY - 1 - back)
        in_steps = step_places(m * HV + head, token, slot, K)
        there = token < left
        tl.store(kept + in_steps, tl.where(there, F, 1.0), slot < K)
        tl.store(turned + in_steps, tl.where(there, W, 0.0), slot < K)
        tl.store(along + in_steps, tl.where(there, along_h, 0.0), slot < K)
        S = tl.trans(to_end) * S + product(tl.trans(R), h, dtype)
        own = tl.sum(S * S, 1, keep_dims=True)
        S *= tl.where(own == 0, 0.0, tl.rsqrt(own))
        first += EVERY
        left -= EVERY
        place += EVERY * HV
        m += 1
    tl.store(grown + (n * HV + head) * tl.num_programs(2) + part, tl.max(most))
    if end is not None:
        S *= tl.where(blocks == 0, tl.trans(length), 1.0)
        tl.store(end + at + in_state, S, inside)
