"""What the tokens of a sequence write, and backwards their gradients, from the last token to the first. One program per sequence
and head goes through blocks of 16 tokens. See the derivation in __init__.py.
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
        load_overlaps(overlaps, t, here, head, HV, begin, i, PART, False, HEADS_K),
    )


@triton.jit(do_not_specialize=["T"])
def write_tokens(
    k, v, gamma, overlaps, start, answers, kept, u, scratch, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """answers [BT, HV, V]: z; kept [BT, HV, 4]: what `find_factors` finds; u [BT, HV, V]. scratch [N, HV, 16, V]."""
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
        Z = tl.dot(S.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
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
                value = value.to(tl.float32)
                for earlier in tl.static_range(BLOCK - PART + now):
                    z += row[earlier] * before[earlier]
                square, along = sum_over_channels(z * z), sum_over_channels(z * value)
                r, p, cubed, turn = find_factors(square, along)
                write = gain.to(tl.float32) * (r * value - p * z)
                before += (write,)
                place = (t + begin + now) * HV + head
                here = (copy == 0) & (t + begin + now < stop)
                tl.store(answers + place * V + channel, z, here & (channel < V))
                tl.store(u + place * V + channel, write.to(u.dtype.element_ty), here & (channel < V))
                numbers = tl.where(channel < 2, tl.where(channel == 0, r, p), tl.where(channel == 2, cubed, turn))
                tl.store(kept + place * 4 + channel, numbers, here & (channel < 4))
            before = before[PART:]
        tl.debug_barrier()
        U = load_values(u, t, stop, head, HV, V, PV, BLOCK)
        S = tl.dot(tl.trans(U), keys, S, input_precision=PRECISION)
        keys = next_keys


@triton.jit
def load_token_back(
    v, gamma, overlaps, answers, kept, du, first_du, t, begin, i: tl.constexpr, stop, head, channel, HV,
    V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of the token whose turn is i in a part of the block from t on: the two parts of du that are known, answer, value, gamma,
    the four numbers that the forward kept, and the products of its key with those after it."""
    place = BLOCK - 1 - begin - i
    t += place
    here = (t < stop) & (place >= 0)
    inside = (channel < V) & here
    at = t * HV + head
    return (
        tl.load(first_du + place * V + channel, inside, 0.0),
        tl.load(du + at * V + channel, inside, 0.0),
        tl.load(answers + at * V + channel, inside, 0.0),
        tl.load(v + at * V + channel, inside, 0.0),
        tl.load(gamma + t * (HV // HEADS_GAMMA) + head // HEADS_GAMMA, here, 0.0),
        tl.load(kept + at * 4, here, 0.0),
        tl.load(kept + at * 4 + 1, here, 0.0),
        tl.load(kept + at * 4 + 2, here, 0.0),
        tl.load(kept + at * 4 + 3, here, 0.0),
        load_overlaps(overlaps, t, here, head, HV, begin, i, PART, True, HEADS_K),
    )


@triton.jit
def differentiate_answer(raw, du):
    """dz, dv and dgamma of a token."""
    z, value, gain = raw[2], raw[3].to(tl.float32), to_float_or_nan(raw[4])
    r, p, cubed, turn = raw[5], raw[6], raw[7], raw[8]
    answer_dot, value_dot = sum_over_channels(z * du), sum_over_channels(value * du)
    scaled = gain * du
    across = gain * cubed * answer_dot
    turned = gain * (turn * answer_dot - cubed * value_dot)
    return turned * z - across * value - p * scaled, r * scaled - across * z, r * value_dot - p * answer_dot


@triton.jit(do_not_specialize=["T"])
def pass_gradients(
    q, k, v, gamma, overlaps, do, d_end, answers, kept, du, dz, dv, dgamma, states, d_start, scratch, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du [BT, HV, V]: P^T dO of every chunk of 64 tokens. dz [BT, HV, V] comes out negated. states [M, HV, K, V]: the gradient
    of the state at the end of every chunk. scratch [N, HV, 16, V]."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    m, chunks = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
    channel, copy = lay_out_channels(LANES, COPIES, EACH)
    stored = (channel < V) & (copy == 0)
    at = n.to(tl.int64) * HV + head
    scratch += at * BLOCK * V
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    L = tl.zeros((PV, PK), tl.float32) if d_end is None else load_transposed(d_end + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    keys = load_keys(k, first + (blocks - 1) * BLOCK, stop, head, HV, K, PK, HEADS_K, BLOCK)
    for step in range(0, blocks):
        block = blocks - 1 - step
        t = first + block * BLOCK
        if (step == 0) | (block % 4 == 3):
            store_transposed(states + ((m + block // 4).to(tl.int64) * HV + head) * K * V, L, K, V)
        D = tl.dot(L.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        tl.store(scratch + i[None, :] * V + j[:, None], D, (j < V)[:, None])
        tl.debug_barrier()
        next_keys = load_keys(k, t - BLOCK, stop, head, HV, K, PK, HEADS_K, BLOCK)
        ahead, later_dz = (), ()
        for turn in tl.static_range(AHEAD):
            ahead += (
                load_token_back(
                    v, gamma, overlaps, answers, kept, du, scratch, t, 0, turn, stop, head, channel, HV, V, HEADS_K,
                    HEADS_GAMMA, PART,
                ),
            )  # fmt: skip
        for _ in tl.static_range(BLOCK - PART):
            later_dz += (tl.zeros((LANES, COPIES, EACH), tl.float32),)
        for begin in range(0, BLOCK, PART):
            for turn in tl.static_range(PART):
                token = ahead[0]
                ahead = ahead[1:] + (
                    load_token_back(
                        v, gamma, overlaps, answers, kept, du, scratch, t, begin, turn + AHEAD, stop, head, channel, HV, V,
                        HEADS_K, HEADS_GAMMA, PART,
                    ),
                )  # fmt: skip
                d_write, row = token[0] + token[1], token[9]
                for later in tl.static_range(BLOCK - PART + turn):
                    d_write += row[later] * later_dz[later]
                d_answer, d_value, d_gain = differentiate_answer(token, d_write)
                later_dz += (d_answer,)
                here = t + (BLOCK - 1 - begin - turn)
                place = here * HV + head
                inside = stored & (here < stop)
                tl.store(dz + place * V + channel, (-d_answer).to(dz.dtype.element_ty), inside)
                tl.store(dv + place * V + channel, d_value.to(dv.dtype.element_ty), inside)
                d_gain = (d_gain + 0 * d_value).to(dgamma.dtype.element_ty)
                tl.store(dgamma + place + 0 * channel, d_gain, inside & (channel == 0))
            later_dz = later_dz[PART:]
        tl.debug_barrier()
        D = load_values(dz, t, stop, head, HV, V, PV, BLOCK)
        L = tl.dot(tl.trans(-D), keys, L, input_precision=PRECISION)
        keys = next_keys
        if block % 4 == 0:
            queries = load_keys(q, t, tl.minimum(t + 64, stop), head, HV, K, PK, HEADS_K, 64)
            grad_o = load_values(do, t, tl.minimum(t + 64, stop), head, HV, V, PV, 64)
            L = tl.dot(tl.trans(grad_o), queries, L, input_precision=PRECISION)
    if d_start is not None:
        store_transposed(d_start + at * K * V, L, K, V)
