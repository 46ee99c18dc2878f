"""What the tokens of a sequence write in float32, and backwards in every dtype their gradients, from the last token to the first.
One program per sequence and head goes through blocks of 16 tokens. See the derivation in __init__.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
from ..common.packing import chunk_place, pieces_of_sequence, tokens_of_sequence
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
    inside = (t + i < stop)[:, None] & (c < K)[None, :]
    return tl.load(tile_address(k, t, head, HV, c, K, HEADS_K, ROWS), inside, 0.0)


@triton.jit
def load_values(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, PV] of a tensor [BT, HV, V] from token t on."""
    i, j = tl.arange(0, ROWS), tl.arange(0, PV)
    inside = (t + i < stop)[:, None] & (j < V)[None, :]
    return tl.load(x + (t * HV + head) * V + i[:, None] * (HV * V) + j[None, :], inside, 0.0)


@triton.jit
def load_overlaps(overlaps, t, here, head, HV, begin, i: tl.constexpr, PART: tl.constexpr, HEADS_K: tl.constexpr):
    """The products of key t with keys before it in the block, the last BLOCK - PART before its part and those of the part; 0
    where the block has no such key. It is key i of the part that begins at key `begin`, or beyond, in the next part."""
    row = overlaps + (t * (HV // HEADS_K) + head // HEADS_K) * BLOCK
    found = ()
    for j in tl.static_range(BLOCK - PART + i % PART):
        first_of_part = begin + (i // PART + 1 + j // PART) * PART - BLOCK
        found += (tl.load(row + first_of_part + j % PART, here & (first_of_part >= 0), 0.0),)
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


SHORTEST = tl.constexpr(1e-6)  # a shorter answer has no direction


@triton.jit
def find_factors(square, along):
    """r, p, and what is 0 without a direction: r^3 and 3 p r^2."""
    short = square < SHORTEST * SHORTEST
    r = tl.where(short, 1.0, tl.rsqrt(square))
    cubed = tl.where(short, 0.0, r * r * r)
    p = along * cubed
    return r, tl.where(short, 1.0, p), cubed, 3 * p * r * r


@triton.jit
def load_token(
    v, gamma, overlaps, first_answers, t, begin, i: tl.constexpr, stop, head, channel, HV,
    V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What token i of a part of the block from t on takes: its answer by the memory at the block's start, value, gamma,
    and the products of its key with those before it."""
    place = begin + i
    here = (t + place < stop) & (place < BLOCK)
    t += place
    inside = (channel < V) & here
    return (
        tl.load(first_answers + place * V + channel, inside, 0.0),
        tl.load(v + (t * HV + head) * V + channel, inside, 0.0),
        tl.load(gamma + t * (HV // HEADS_GAMMA) + head // HEADS_GAMMA, here, 0.0),
        load_overlaps(overlaps, t, here, head, HV, begin, i, PART, HEADS_K),
    )


@triton.jit(do_not_specialize=["T"])
def write_tokens(
    k, v, gamma, overlaps, start, answers, kept, u, scratch, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All in float32, but gamma of any dtype. answers [BT, HV, V]: z; kept [BT, HV, 4]: what `find_factors` finds; u [BT, HV, V].
    scratch [N, HV, 16, V]."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    channel, copy = lay_out_channels(LANES, COPIES, EACH)
    at = n.to(tl.int64) * HV + head
    scratch += at * BLOCK * V
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    S = tl.zeros((PV, PK), tl.float32) if start is None else load_transposed(start + at * K * V, K, PK, V, PV)
    keys = load_keys(k, first, stop, head, HV, K, PK, HEADS_K, BLOCK)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for block in range(0, blocks):
        t = first + block * BLOCK
        Z = tl.dot(S, tl.trans(keys), input_precision=PRECISION)
        tl.store(scratch + i[None, :] * V + j[:, None], Z, (j < V)[:, None])
        tl.debug_barrier()
        next_keys = load_keys(k, t + BLOCK, stop, head, HV, K, PK, HEADS_K, BLOCK)
        ahead, before = (), ()
        for now in tl.static_range(AHEAD):
            ahead += (
                load_token(
                    v, gamma, overlaps, scratch, t, 0, now, stop, head, channel, HV, V, HEADS_K, HEADS_GAMMA, PART
                ),
            )
        for _ in tl.static_range(BLOCK - PART):
            before += (tl.zeros((LANES, COPIES, EACH), tl.float32),)
        for begin in range(0, BLOCK, PART):
            for now in tl.static_range(PART):
                z, value, gain, row = ahead[0]
                ahead = ahead[1:] + (
                    load_token(
                        v, gamma, overlaps, scratch, t, begin, now + AHEAD, stop, head, channel, HV, V, HEADS_K, HEADS_GAMMA, PART
                    ),
                )  # fmt: skip
                for earlier in tl.static_range(BLOCK - PART + now):
                    z += row[earlier] * before[earlier]
                square, along = sum_over_channels(z * z), sum_over_channels(z * value)
                r, p, cubed, turn = find_factors(square, along)
                write = gain.to(tl.float32) * (r * value - p * z)
                before += (write,)
                place = (t + begin + now) * HV + head
                here = (copy == 0) & (t + begin + now < stop)
                tl.store(answers + place * V + channel, z, here & (channel < V))
                tl.store(u + place * V + channel, write, here & (channel < V))
                numbers = tl.where(channel < 2, tl.where(channel == 0, r, p), tl.where(channel == 2, cubed, turn))
                tl.store(kept + place * 4 + channel, numbers, here & (channel < 4))
            before = before[PART:]
        tl.debug_barrier()
        U = load_values(u, t, stop, head, HV, V, PV, BLOCK)
        S = tl.dot(tl.trans(U), keys, S, input_precision=PRECISION)
        keys = next_keys


@triton.jit
def load_columns(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr):
    """[PV, 16] in float32 of a tensor [BT, HV, V] from token t on: tokens are columns."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    inside = (t + i < stop)[None, :] & (j < V)[:, None]
    return tl.load(x + (t * HV + head) * V + i[None, :] * (HV * V) + j[:, None], inside, 0.0).to(tl.float32)


@triton.jit
def load_factors(gamma, kept, t, stop, head, HV, HEADS_GAMMA: tl.constexpr):
    """Of the tokens of a block [16]: gamma, r and p, gamma times what dz takes of z for z.du and for v.du, and gamma r^3."""
    i = tl.arange(0, BLOCK)
    here = t + i < stop
    gain = to_float_or_nan(tl.load(gamma + (t + i) * (HV // HEADS_GAMMA) + head // HEADS_GAMMA, here, 0.0))
    numbers = kept + ((t + i) * HV + head) * 4
    r, p = tl.load(numbers, here, 0.0), tl.load(numbers + 1, here, 0.0)
    cubed, turn = tl.load(numbers + 2, here, 0.0), tl.load(numbers + 3, here, 0.0)
    return gain, r, p, gain * turn, -gain * cubed, gain * cubed


@triton.jit
def add_powers(L, LEVELS: tl.constexpr):
    """(I - L)^-1 for L [16, 16] whose power 2^LEVELS is 0."""
    i = tl.arange(0, BLOCK)
    total = L + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for _ in tl.static_range(LEVELS - 1):
        L = tl.dot(L, L, input_precision="tf32x3")
        total = tl.dot(total, L, total, input_precision="tf32x3")
    return total


@triton.jit
def store_inverse(to, L):
    """(I - L)^-1 [32, 32] for L of two numbers per token, 0 but for pairs with later tokens: by halves of 8 tokens."""
    left, right = tl.split(tl.permute(tl.reshape(L, (2, BLOCK, 2, BLOCK)), (0, 1, 3, 2)))
    first, _ = tl.split(tl.permute(left, (1, 2, 0)))
    between, last = tl.split(tl.permute(right, (1, 2, 0)))
    first, last = add_powers(first, 3), add_powers(last, 3)
    between = tl.dot(first, between, input_precision="tf32x3")
    between = tl.dot(between, last, input_precision="tf32x3")
    i = tl.arange(0, BLOCK)
    to += i[:, None] * 32 + i[None, :]
    tl.store(to, first)
    tl.store(to + BLOCK, between)
    tl.store(to + BLOCK * 32, tl.zeros_like(first))
    tl.store(to + BLOCK * 33, last)


@triton.jit(do_not_specialize=["time"])
def block_systems(
    v, gamma, overlaps, answers, kept, through, turned, systems, chunks, time, HV,
    V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """By blocks of 16 tokens [4 M, HV, ..]: through and turned [16, 16] and systems [32, 32], as in the derivation."""
    m, block, head = tl.program_id(0) // 4, tl.program_id(0) % 4, tl.program_id(1)
    first, count = chunk_place(chunks, m, time)
    t, stop = first + block * BLOCK, first + count
    i = tl.arange(0, BLOCK)
    row = overlaps + ((t + i) * (HV // HEADS_K) + head // HEADS_K) * BLOCK
    later = (i[:, None] < i[None, :]) & (t + i < stop)[None, :] & (t + i < stop)[:, None]
    A = tl.load(row[:, None] + i[None, :], later, 0.0)
    gain, r, p, along, across, aside = load_factors(gamma, kept, t, stop, head, HV, HEADS_GAMMA)
    M = add_powers(-A * (gain * p)[None, :], 4)
    N = tl.dot(M, A, input_precision="tf32x3")
    Z, values = load_columns(answers, t, stop, head, HV, V, PV), load_columns(v, t, stop, head, HV, V, PV)
    both = tl.trans(tl.reshape(tl.join(Z, values), (PV, 32)))  # z in even rows, v in odd ones
    with_z = tl.dot(both, Z, input_precision=PRECISION)
    with_v = tl.dot(both, values, input_precision=PRECISION)
    N2 = tl.reshape(tl.broadcast_to(N[:, None, :], (BLOCK, 2, BLOCK)), (32, BLOCK))
    of_a = N2 * (with_z * along[None, :] - with_v * aside[None, :])
    L = tl.reshape(tl.join(of_a, N2 * (with_z * across[None, :])), (32, 32))
    at = tl.program_id(0).to(tl.int64) * HV + head
    tl.store(through + at * 256 + i[:, None] * BLOCK + i[None, :], M)
    tl.store(turned + at * 256 + i[:, None] * BLOCK + i[None, :], N)
    store_inverse(systems + at * 1024, L)


@triton.jit(do_not_specialize=["T"])
def pass_gradients(
    q, k, v, gamma, do, d_end, answers, kept, du, through, turned, systems, dz, dv, dgamma, states, d_start, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """du [BT, HV, V]: P^T dO of every chunk of 64 tokens. dz [BT, HV, V] comes out negated. states [M, HV, K, V]: the gradient
    of the state at the end of every chunk."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    m, chunks = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
    at = n.to(tl.int64) * HV + head
    i, j, both = tl.arange(0, BLOCK), tl.arange(0, PV), tl.arange(0, 32)
    L = tl.zeros((PV, PK), tl.float32) if d_end is None else load_transposed(d_end + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for step in range(0, blocks):
        block = blocks - 1 - step
        t = first + block * BLOCK
        if (step == 0) | (block % 4 == 3):
            store_transposed(states + ((m + block // 4).to(tl.int64) * HV + head) * K * V, L, K, V)
        keys = load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK)
        system = ((m.to(tl.int64) * 4 + block) * HV) + head
        square = system * 256 + i[None, :] * BLOCK + i[:, None]  # turned
        M, N = tl.load(through + square), tl.load(turned + square)
        solution = tl.load(systems + system * 1024 + both[:, None] * 32 + both[None, :])
        Z, values = load_columns(answers, t, stop, head, HV, V, PV), load_columns(v, t, stop, head, HV, V, PV)
        gain, r, p, along, across, aside = load_factors(gamma, kept, t, stop, head, HV, HEADS_GAMMA)
        D = load_columns(du, t, stop, head, HV, V, PV)
        D = tl.dot(L.to(keys.dtype), tl.trans(keys), D, input_precision=PRECISION)
        D = tl.dot(D, M, input_precision="tf32x3")
        dots = tl.reshape(tl.join(tl.sum(Z * D, 0), tl.sum(values * D, 0)), (32,))
        answer_dot, value_dot = tl.split(tl.reshape(tl.sum(solution * dots[None, :], 1), (BLOCK, 2)))
        X = Z * (along * answer_dot + across * value_dot)[None, :] - values * (aside * answer_dot)[None, :]
        D = tl.dot(X, N, D, input_precision="tf32x3")
        d_answer = X - D * (gain * p)[None, :]
        d_value = D * (gain * r)[None, :] - Z * (aside * answer_dot)[None, :]
        here = (t + i < stop)[None, :] & (j < V)[:, None]
        places = (t * HV + head) * V + i[None, :] * (HV * V) + j[:, None]
        tl.store(dz + places, (-d_answer).to(dz.dtype.element_ty), here)
        tl.store(dv + places, d_value.to(dv.dtype.element_ty), here)
        d_gain = r * value_dot - p * answer_dot
        tl.store(dgamma + (t + i) * HV + head, d_gain.to(dgamma.dtype.element_ty), t + i < stop)
        L = tl.dot(d_answer.to(keys.dtype), keys, L, input_precision=PRECISION)
        if block % 4 == 0:
            queries = load_keys(q, t, tl.minimum(t + 64, stop), head, HV, K, PK, HEADS_K, 64)
            grad_o = load_values(do, t, tl.minimum(t + 64, stop), head, HV, V, PV, 64)
            L = tl.dot(tl.trans(grad_o), queries, L, input_precision=PRECISION)
    if d_start is not None:
        store_transposed(d_start + at * K * V, L, K, V)
