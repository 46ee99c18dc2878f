"""The same in 16 bits by inner products of a block's answers and values, which follow from token to token: what the tokens of a
sequence write, and backwards their gradients. See the derivation in __init__.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import prefetch_rows, to_float_or_nan
from ..common.packing import chunk_place, pieces_of_sequence, tokens_of_sequence
from .tokens import (
    BLOCK,
    SHORTEST,
    fetch_tokens,
    find_factors,
    load_keys,
    load_transposed,
    load_values,
    store_transposed,
)


@triton.jit
def load_columns(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr):
    """[PV, 16] of a tensor [BT, HV, V] from token t on: tokens are columns."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    inside = (t + i < stop)[None, :] & (j < V)[:, None]
    return tl.load(x + (t * HV + head) * V + i[None, :] * (HV * V) + j[:, None], inside, 0.0)


@triton.jit
def split_columns(x, COUNT: tl.constexpr):
    """The columns of x [R, COUNT], each [R]; COUNT is a power of two. The first to be split are pairs of columns, which lie in
    different lanes where x is a product's result, so that Triton moves x as a whole to where a thread has a row."""
    quads = tl.permute(tl.reshape(x, (x.shape[0], COUNT // 4, 2, 2)), (0, 1, 3, 2))
    first, second = tl.split(quads)
    columns = (tl.reshape(first, (x.shape[0], COUNT // 2)), tl.reshape(second, (x.shape[0], COUNT // 2)))
    for level in tl.static_range(1, COUNT.bit_length() - 1):
        evens, odds = (), ()
        for i in tl.static_range(2**level):
            even, odd = tl.split(tl.reshape(columns[i], (x.shape[0], COUNT // 2 ** (level + 1), 2)))
            evens += (even,)
            odds += (odd,)
        columns = evens + odds
    found = ()
    for i in tl.static_range(COUNT):
        found += (tl.reshape(columns[i // 4 * 4 + i % 2 * 2 + i // 2 % 2], (x.shape[0],)),)
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
    """Of every key of a block [32] the products with later ones: that with key i in lane 2 i, 0 in odd lanes."""
    lane = tl.arange(0, 32)
    row = overlaps + (t * (HV // HEADS_K) + head // HEADS_K) * BLOCK + lane // 2
    here, found = (t + lane // 2 < stop) & (lane % 2 == 0), ()
    for i in tl.static_range(BLOCK):
        found += (tl.load(row + i * (HV // HEADS_K * BLOCK), here & (lane // 2 > i), 0.0),)
    return found


@triton.jit
def load_spread_columns(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr):
    """As `load_columns`, every row in a lane."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    inside = (t + i < stop)[None, :] & (j < V)[:, None]
    return tl.load(x + (t * HV + head) * V + place_columns(j, 16, HV * V), inside, 0.0)


@triton.jit
def find_shares(square, along, gain):
    """How much of v and of -z a token writes: gamma r and gamma p, few products after the root."""
    short = square < SHORTEST * SHORTEST
    r = tl.where(short, 1.0, tl.rsqrt(square))
    return gain * r, (gain * tl.where(short, 1.0, along) * r) * (r * r)


@triton.jit(do_not_specialize=["T"])
def write_by_products(
    k, v, gamma, overlaps, start, answers, kept, u, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    GRAM: tl.constexpr, FETCH: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """answers [BT, HV, V]: z; kept [BT, HV, 4]: what `find_factors` finds; u [BT, HV, V]. GRAM: inner products of answers follow
    from those at the block's start; else they are sums over the channels."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    at = n.to(tl.int64) * HV + head
    lane = tl.arange(0, 32)
    channel = tl.arange(0, PV // 32)[:, None] * 32 + lane[None, :]
    inside, stride = channel < V, HV * V
    S = tl.zeros((PV, PK), tl.float32) if start is None else load_transposed(start + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for block in range(0, blocks):
        t = first + block * BLOCK
        left = tl.minimum(stop - t, BLOCK).to(tl.int32)
        row = (t * HV + head) * V + channel
        value_row, answer_row, write_row = v + row, answers + row, u + row
        keys = load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK)
        if APART:
            values = load_columns(v, t, stop, head, HV, V, PV)
        else:
            values = load_spread_columns(v, t, stop, head, HV, V, PV)
            value = split_columns(values, 16)
        gain = gamma + (t + lane) * (HV // HEADS_GAMMA) + head // HEADS_GAMMA
        gain = tl.load(gain, (lane < BLOCK) & (t + lane < stop), 0.0).to(tl.float32)
        with_later = load_products(overlaps, t, stop, head, HV, HEADS_K)
        if FETCH:
            after = tl.minimum(t + BLOCK, stop - 1)
            ahead = tl.minimum(stop - after, BLOCK)
            fetch_tokens(k, after, ahead, head, HV, K, HEADS_K)
            fetch_tokens(v, after, ahead, head, HV, V, 1)
            fetch_tokens(gamma, after, ahead, head, HV, 1, HEADS_GAMMA)
            fetch_tokens(overlaps, after, ahead, head, HV, 16, HEADS_K)
        Z = tl.dot(S.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        z = split_columns(Z, 16)
        if GRAM:
            both = tl.reshape(tl.join(Z, values.to(tl.float32)), (PV, 32))  # z in even columns, v in odd ones
            both = split_columns(tl.dot(tl.trans(both), both, input_precision=PRECISION), 32)
            by_z, by_v = both[::2], both[1::2]
            square, along = take_lane(by_z[0], 0), take_lane(by_v[0], 0)
        squares, alongs = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32)
        for now in tl.static_range(BLOCK):
            answer = tl.reshape(z[0], (PV // 32, 32))
            if APART:
                wanted = tl.load(value_row + now * stride, inside & (now < left), 0.0).to(tl.float32)
            else:
                wanted = tl.reshape(value[now].to(tl.float32), (PV // 32, 32))
            if not GRAM:
                square, along = tl.sum(answer * answer), tl.sum(answer * wanted)
            squares, alongs = tl.where(lane == now, square, squares), tl.where(lane == now, along, alongs)
            a, b = find_shares(square, along, take_lane(gain, now))
            tl.store(answer_row + now * stride, answer, inside & (now < left))
            write = take_lane(a, now)[None, :] * wanted - take_lane(b, now)[None, :] * answer
            tl.store(write_row + now * stride, write.to(u.dtype.element_ty), inside & (now < left))
            rest = ()
            for i in tl.static_range(1, BLOCK - now):
                product = take_lane(with_later[now], 2 * (now + i))
                rest += (z[i] + tl.reshape(product[None, :] * write, (PV,)),)
            z = rest
            if GRAM and now < BLOCK - 1:
                c = with_later[now]
                by_u = a * by_v[0] - b * by_z[0]
                length = a * (a * take_lane(by_v[0], 2 * now + 1) - b * along)  # u.u, as u.z is 0
                # The next token's z.z and z.v need no exchange of what this token's root gives.
                product = take_lane(c, 2 * now + 2)
                with_z = a * take_lane(by_v[0], 2 * now + 2) - b * take_lane(by_z[0], 2 * now + 2)
                with_v = a * take_lane(by_v[0], 2 * now + 3) - b * take_lane(by_z[0], 2 * now + 3)
                square = take_lane(by_z[1], 2 * now + 2) + product * (2 * with_z + product * length)
                along = take_lane(by_v[1], 2 * now + 2) + product * with_v
                after = by_u + c * length
                rest_z, rest_v = (by_z[1] + c * with_z + product * after,), (by_v[1] + c * with_v,)
                for i in tl.static_range(2, BLOCK - now):
                    product = take_lane(c, 2 * (now + i))
                    rest_z += (by_z[i] + c * take_lane(by_u, 2 * (now + i)) + product * after,)
                    rest_v += (by_v[i] + c * take_lane(by_u, 2 * (now + i) + 1),)
                by_z, by_v = rest_z, rest_v
        r, p, cubed, turn = find_factors(squares, alongs)
        numbers, here = kept + ((t + lane) * HV + head) * 4, (lane < BLOCK) & (t + lane < stop)
        tl.store(numbers, r, here)
        tl.store(numbers + 1, p, here)
        tl.store(numbers + 2, cubed, here)
        tl.store(numbers + 3, turn, here)
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
def pass_by_products(
    q, k, v, gamma, overlaps, do, d_end, answers, kept, du, products, dz, dv, dgamma, states, d_start, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    FETCH: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
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
    inside, stride = channel < V, HV * V
    L = tl.zeros((PV, PK), tl.float32) if d_end is None else load_transposed(d_end + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for step in range(0, blocks):
        block = blocks - 1 - step
        t = first + block * BLOCK
        left = tl.minimum(stop - t, BLOCK).to(tl.int32)
        row = (t * HV + head) * V + channel
        answer_row, value_row, answer_grads, value_grads = answers + row, v + row, dz + row, dv + row
        if (step == 0) | (block % 4 == 3):
            store_transposed(states + ((m + block // 4).to(tl.int64) * HV + head) * K * V, L, K, V)
        keys = load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK)
        D = load_columns(du, t, stop, head, HV, V, PV)
        if APART:
            Z, values = load_columns(answers, t, stop, head, HV, V, PV), load_columns(v, t, stop, head, HV, V, PV)
        else:
            Z = load_spread_columns(answers, t, stop, head, HV, V, PV)
            values = load_spread_columns(v, t, stop, head, HV, V, PV)
            z, value = split_columns(Z, 16), split_columns(values, 16)
        of_block = products + ((m.to(tl.int64) * 4 + block) * HV + head) * 1024
        with_both = ()
        for i in tl.static_range(32):
            with_both += (tl.load(of_block + i * 32 + lane),)
        with_later = load_products(overlaps, t, stop, head, HV, HEADS_K)
        r, p, along, aside, less, more = load_factors(gamma, kept, t, stop, head, HV, HEADS_GAMMA)
        if FETCH:
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
        grad = split_columns(D, 16)
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
            here, d_write = inside & (15 - back < left), tl.reshape(grad[15 - back], (PV // 32, 32))
            if APART:
                answer = tl.load(answer_row + (15 - back) * stride, here, 0.0)
                wanted = tl.load(value_row + (15 - back) * stride, here, 0.0).to(tl.float32)
            else:
                answer = tl.reshape(z[15 - back], (PV // 32, 32))
                wanted = tl.reshape(value[15 - back].to(tl.float32), (PV // 32, 32))
            negated = y[None, :] * wanted + loss[None, :] * d_write - x[None, :] * answer
            d_value = take_lane(more, 15 - back)[None, :] * d_write - y[None, :] * answer
            tl.store(answer_grads + (15 - back) * stride, negated.to(dz.dtype.element_ty), here)
            tl.store(value_grads + (15 - back) * stride, d_value.to(dv.dtype.element_ty), here)
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
