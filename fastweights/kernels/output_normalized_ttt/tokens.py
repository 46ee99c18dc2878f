"""What the tokens of a sequence write, token after token, and backwards their gradients, block after block. One program per
sequence and head goes through blocks of 16 tokens. See the derivation in __init__.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import prefetch_rows, to_float_or_nan
from ..common.packing import chunk_place, pieces_of_sequence, tokens_of_sequence
from ..common.tiles import tile_address

BLOCK = tl.constexpr(16)


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
def load_columns(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr):
    """[PV, 16] of a tensor [BT, HV, V] from token t on: tokens are columns."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    inside = (t + i < stop)[None, :] & (j < V)[:, None]
    return tl.load(x + (t * HV + head) * V + i[None, :] * (HV * V) + j[:, None], inside, 0.0)


@triton.jit
def split_columns(x, COUNT: tl.constexpr):
    """The columns of x [R, COUNT], each [R]; COUNT is a power of two."""
    columns = (x,)
    for level in tl.static_range(COUNT.bit_length() - 1):
        evens, odds = (), ()
        for i in tl.static_range(2**level):
            even, odd = tl.split(tl.reshape(columns[i], (x.shape[0], COUNT // 2 ** (level + 1), 2)))
            evens += (even,)
            odds += (odd,)
        columns = evens + odds
    found = ()
    for i in tl.static_range(COUNT):
        found += (tl.reshape(columns[i], (x.shape[0],)),)
    return found


@triton.jit
def take_lane(x, lane: tl.constexpr):
    """x[lane] in every place of a vector [32]."""
    return tl.gather(x, tl.full((32,), lane, tl.int32), 0)


@triton.jit
def place_columns(row, COUNT: tl.constexpr, stride):
    """Offsets [R, COUNT] of columns `stride` apart. They are called contiguous along a column alone, one number at a time, so
    that Triton gives every row a lane, where columns are split and joined without an exchange."""
    column = tl.arange(0, COUNT)
    return tl.multiple_of(tl.max_contiguous(row[:, None] + column[None, :] * stride, [32, 1]), [1, 1])


@triton.jit
def load_products(overlaps, t, stop, head, HV, HEADS_K: tl.constexpr):
    """[32, 16]: of every key of a block the products with later ones, that with key i in row 2 i, 0 in odd rows."""
    i, lane = tl.arange(0, BLOCK), tl.arange(0, 32)
    at = place_columns(lane // 2, 16, HV // HEADS_K * BLOCK)
    later = (lane[:, None] // 2 > i[None, :]) & (t + lane // 2 < stop)[:, None] & (lane % 2 == 0)[:, None]
    return tl.load(overlaps + (t * (HV // HEADS_K) + head // HEADS_K) * BLOCK + at, later, 0.0)


@triton.jit
def load_spread_columns(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr):
    """As `load_columns`, every row in a lane."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    inside = (t + i < stop)[None, :] & (j < V)[:, None]
    return tl.load(x + (t * HV + head) * V + place_columns(j, 16, HV * V), inside, 0.0)


@triton.jit
def fetch_tokens(x, t, count, head, HV, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """Fetch `count` tokens of a tensor [BT, HV / HEADS, WIDTH], at most 16, into the L1 cache."""
    prefetch_rows(x, t * (HV // HEADS) + head // HEADS, count, HV // HEADS, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["T"])
def write_tokens(
    k, v, gamma, overlaps, start, answers, kept, u, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    GRAM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """answers [BT, HV, V]: z; kept [BT, HV, 4]: what `find_factors` finds; u [BT, HV, V]. GRAM: inner products of answers follow
    from those at the block's start; else they are sums over the channels."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    at = n.to(tl.int64) * HV + head
    lane = tl.arange(0, 32)
    channel = tl.arange(0, PV // 32)[:, None] * 32 + lane[None, :]
    S = tl.zeros((PV, PK), tl.float32) if start is None else load_transposed(start + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for block in range(0, blocks):
        t = first + block * BLOCK
        keys = load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK)
        values = load_spread_columns(v, t, stop, head, HV, V, PV)
        gain = gamma + (t + lane) * (HV // HEADS_GAMMA) + head // HEADS_GAMMA
        gain = tl.load(gain, (lane < BLOCK) & (t + lane < stop), 0.0)
        products = load_products(overlaps, t, stop, head, HV, HEADS_K)
        if PRECISION == "tf32":  # float32, which the interpreter runs too, does without
            after = tl.minimum(t + BLOCK, stop - 1)
            ahead = tl.minimum(stop - after, BLOCK)
            fetch_tokens(k, after, ahead, head, HV, K, HEADS_K)
            fetch_tokens(v, after, ahead, head, HV, V, 1)
            fetch_tokens(gamma, after, ahead, head, HV, 1, HEADS_GAMMA)
            fetch_tokens(overlaps, after, ahead, head, HV, 16, HEADS_K)
        Z = tl.dot(S.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        z, value, with_later = split_columns(Z, 16), split_columns(values, 16), split_columns(products, 16)
        if GRAM:
            values = values.to(tl.float32)
            pairs = tl.trans(tl.reshape(tl.join(Z, values), (PV, 32)))  # z in even rows, v in odd ones
            by_z = split_columns(tl.dot(pairs, Z, input_precision=PRECISION), 16)
            by_v = split_columns(tl.dot(pairs, values, input_precision=PRECISION), 16)
        squares, alongs = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32)
        for now in tl.static_range(BLOCK):
            answer, wanted = tl.reshape(z[0], (PV // 32, 32)), tl.reshape(value[now].to(tl.float32), (PV // 32, 32))
            if GRAM:
                square, along = take_lane(by_z[0], 2 * now), take_lane(by_v[0], 2 * now)
            else:
                square, along = tl.sum(answer * answer), tl.sum(answer * wanted)
            squares, alongs = tl.where(lane == now, square, squares), tl.where(lane == now, along, alongs)
            r, p, _, _ = find_factors(square, along)
            rate = take_lane(gain, now).to(tl.float32)
            a, b = rate * r, rate * p
            write = a[None, :] * wanted - b[None, :] * answer
            place, inside = ((t + now) * HV + head) * V + channel, (channel < V) & (t + now < stop)
            tl.store(answers + place, answer, inside)
            tl.store(u + place, write.to(u.dtype.element_ty), inside)
            rest = ()
            for i in tl.static_range(1, BLOCK - now):
                product = take_lane(with_later[now], 2 * (now + i))
                rest += (z[i] + tl.reshape(product[None, :] * write, (PV,)),)
            z = rest
            if GRAM:
                by_u = a * by_v[0] - b * by_z[0]
                length = a * take_lane(by_u, 2 * now + 1) - b * take_lane(by_u, 2 * now)
                after = by_u + with_later[now] * length
                rest_z, rest_v = (), ()
                for i in tl.static_range(1, BLOCK - now):
                    product = take_lane(with_later[now], 2 * (now + i))
                    rest_z += (by_z[i] + with_later[now] * take_lane(by_u, 2 * (now + i)) + product * after,)
                    rest_v += (by_v[i] + with_later[now] * take_lane(by_u, 2 * (now + i) + 1),)
                by_z, by_v = rest_z, rest_v
        r, p, cubed, turn = find_factors(squares, alongs)
        numbers, inside = kept + ((t + lane) * HV + head) * 4, (lane < BLOCK) & (t + lane < stop)
        tl.store(numbers, r, inside)
        tl.store(numbers + 1, p, inside)
        tl.store(numbers + 2, cubed, inside)
        tl.store(numbers + 3, turn, inside)
        tl.debug_barrier()
        U = load_values(u, t, stop, head, HV, V, PV, BLOCK)
        S = tl.dot(tl.trans(U), keys, S, input_precision=PRECISION)


@triton.jit(do_not_specialize=["time"])
def answer_products(v, answers, products, chunks, time, HV, V: tl.constexpr, PV: tl.constexpr, PRECISION: tl.constexpr):
    """products [4 M, HV, 32, 32]: of the answers z_i and values of every block of 16 tokens, z_i in row 2 i, v_i after it."""
    m, block, head = tl.program_id(0) // 4, tl.program_id(0) % 4, tl.program_id(1)
    first, count = chunk_place(chunks, m, time)
    t, stop, i = first + block * BLOCK, first + count, tl.arange(0, 32)
    Z, values = load_columns(answers, t, stop, head, HV, V, PV), load_columns(v, t, stop, head, HV, V, PV)
    both = tl.reshape(tl.join(Z, values.to(tl.float32)), (PV, 32))
    found = tl.dot(tl.trans(both), both, input_precision=PRECISION)
    tl.store(products + (tl.program_id(0).to(tl.int64) * HV + head) * 1024 + i[:, None] * 32 + i[None, :], found)


@triton.jit
def load_factors(gamma, kept, t, stop, head, HV, HEADS_GAMMA: tl.constexpr):
    """In the lanes of the tokens [32]: r and p; gamma times what dz takes of z for z.du, times r^3, times p and times r."""
    lane = tl.arange(0, 32)
    here = (lane < BLOCK) & (t + lane < stop)
    gain = to_float_or_nan(tl.load(gamma + (t + lane) * (HV // HEADS_GAMMA) + head // HEADS_GAMMA, here, 0.0))
    numbers = kept + ((t + lane) * HV + head) * 4
    r, p = tl.load(numbers, here, 0.0), tl.load(numbers + 1, here, 0.0)
    cubed, turn = tl.load(numbers + 2, here, 0.0), tl.load(numbers + 3, here, 0.0)
    return r, p, gain * turn, gain * cubed, gain * p, gain * r


@triton.jit(do_not_specialize=["T"])
def pass_gradients(
    q, k, v, gamma, overlaps, do, d_end, answers, kept, du, products, dz, dv, dgamma, states, d_start, cu_seqlens, T, HV,
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
    lane = tl.arange(0, 32)
    channel = tl.arange(0, PV // 32)[:, None] * 32 + lane[None, :]
    L = tl.zeros((PV, PK), tl.float32) if d_end is None else load_transposed(d_end + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for step in range(0, blocks):
        block = blocks - 1 - step
        t = first + block * BLOCK
        if (step == 0) | (block % 4 == 3):
            store_transposed(states + ((m + block // 4).to(tl.int64) * HV + head) * K * V, L, K, V)
        keys = load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK)
        D = load_columns(du, t, stop, head, HV, V, PV)
        Z = load_spread_columns(answers, t, stop, head, HV, V, PV)
        values = load_spread_columns(v, t, stop, head, HV, V, PV)
        here = products + ((m.to(tl.int64) * 4 + block) * HV + head) * 1024
        with_both = split_columns(tl.load(here + place_columns(lane, 32, 32)), 32)
        with_later = split_columns(load_products(overlaps, t, stop, head, HV, HEADS_K), 16)
        r, p, along, aside, less, more = load_factors(gamma, kept, t, stop, head, HV, HEADS_GAMMA)
        if PRECISION == "tf32":
            before = tl.maximum(t - BLOCK, first)
            ahead = tl.minimum(stop - before, BLOCK)
            fetch_tokens(k, before, ahead, head, HV, K, HEADS_K)
            fetch_tokens(v, before, ahead, head, HV, V, 1)
            fetch_tokens(answers, before, ahead, head, HV, V, 1)
            fetch_tokens(du, before, ahead, head, HV, V, 1)
            fetch_tokens(gamma, before, ahead, head, HV, 1, HEADS_GAMMA)
            fetch_tokens(kept, before, ahead, head, HV, 4, 1)
            fetch_tokens(overlaps, before, ahead, head, HV, 16, HEADS_K)
            prefetch_rows(products, (m.to(tl.int64) * 4 + tl.maximum(block - 1, 0)) * HV + head, 1, 0, 1024, 1)
        D = tl.dot(L.to(keys.dtype), tl.trans(keys), D, input_precision=PRECISION)
        z, value, grad = split_columns(Z, 16), split_columns(values, 16), split_columns(D, 16)
        pairs = tl.trans(tl.reshape(tl.join(Z, values.to(tl.float32)), (PV, 32)))
        by_grad = split_columns(tl.dot(pairs, D, input_precision=PRECISION), 16)
        answer_dots, value_dots = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32)
        for back in tl.static_range(BLOCK):
            a, b = take_lane(by_grad[15 - back], 30 - 2 * back), take_lane(by_grad[15 - back], 31 - 2 * back)
            answer_dots = tl.where(lane == 15 - back, a, answer_dots)
            value_dots = tl.where(lane == 15 - back, b, value_dots)
            y = take_lane(aside, 15 - back)
            x, y = take_lane(along, 15 - back) * a - y * b, y * a
            loss = take_lane(less, 15 - back)
            by_answer = x * with_both[30 - 2 * back] - y * with_both[31 - 2 * back] - loss * by_grad[15 - back]
            answer, d_write = tl.reshape(z[15 - back], (PV // 32, 32)), tl.reshape(grad[15 - back], (PV // 32, 32))
            wanted = tl.reshape(value[15 - back].to(tl.float32), (PV // 32, 32))
            negated = y[None, :] * wanted + loss[None, :] * d_write - x[None, :] * answer
            d_value = take_lane(more, 15 - back)[None, :] * d_write - y[None, :] * answer
            place, inside = ((t + 15 - back) * HV + head) * V + channel, (channel < V) & (t + 15 - back < stop)
            tl.store(dz + place, negated.to(dz.dtype.element_ty), inside)
            tl.store(dv + place, d_value.to(dv.dtype.element_ty), inside)
            rest, rest_by = (), ()
            for i in tl.static_range(15 - back):
                product = take_lane(with_later[i], 30 - 2 * back)
                rest_by += (by_grad[i] + product * by_answer,)
                rest += (grad[i] - tl.reshape(product[None, :] * negated, (PV,)),)
            grad, by_grad = rest, rest_by
        d_gain = (r * value_dots - p * answer_dots).to(dgamma.dtype.element_ty)
        tl.store(dgamma + (t + lane) * HV + head, d_gain, (lane < BLOCK) & (t + lane < stop))
        tl.debug_barrier()
        negated = load_values(dz, t, stop, head, HV, V, PV, BLOCK)
        L = tl.dot(tl.trans(negated), -keys, L, input_precision=PRECISION)
        if block % 4 == 0:
            queries = load_keys(q, t, tl.minimum(t + 64, stop), head, HV, K, PK, HEADS_K, 64)
            grad_o = load_values(do, t, tl.minimum(t + 64, stop), head, HV, V, PV, 64)
            L = tl.dot(tl.trans(grad_o), queries, L, input_precision=PRECISION)
    if d_start is not None:
        store_transposed(d_start + at * K * V, L, K, V)
