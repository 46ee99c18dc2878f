"""What the tokens of a sequence write, token after token, and backwards their gradients, block after block. One program per
sequence and head goes through blocks of 16 tokens. See the derivation in __init__.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
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
def join_columns(columns, COUNT: tl.constexpr):
    """[R, COUNT] of columns [R]."""
    for level in tl.static_range(COUNT.bit_length() - 1):
        joined = ()
        for i in tl.static_range(COUNT // 2 ** (level + 1)):
            pair = tl.join(columns[i], columns[i + COUNT // 2 ** (level + 1)])
            joined += (tl.reshape(pair, (pair.shape[0], 2 ** (level + 1))),)
        columns = joined
    return columns[0]


@triton.jit
def take_lane(x, lane: tl.constexpr):
    """x[lane] in every place of a vector [32]."""
    return tl.gather(x, tl.full((32,), lane, tl.int32), 0)


@triton.jit
def place_columns(row, stride):
    """Offsets [R, 16] of columns `stride` apart. They are called contiguous along a column alone, one number at a time, so that
    Triton gives every row a lane, where columns are split and joined without an exchange."""
    i = tl.arange(0, BLOCK)
    return tl.multiple_of(tl.max_contiguous(row[:, None] + i[None, :] * stride, [32, 1]), [1, 1])


@triton.jit
def load_block(
    k, v, gamma, overlaps, t, stop, head, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
):  # fmt: skip
    """What the tokens of a block take: keys [16, PK], values [PV, 16], gamma in the lanes of the tokens [32], and the products of
    every key with later ones [32, 16], that with key i in row 2 i, 0 in odd rows."""
    i, lane, j = tl.arange(0, BLOCK), tl.arange(0, 32), tl.arange(0, PV)
    here = t + i < stop
    keys = load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK)
    values = place_columns(j, HV * V)
    gain = gamma + (t + lane) * (HV // HEADS_GAMMA) + head // HEADS_GAMMA
    products = place_columns(lane // 2, HV // HEADS_K * BLOCK)
    later = here[None, :] & (lane[:, None] // 2 > i[None, :]) & (lane % 2 == 0)[:, None]
    return (
        keys,
        tl.load(v + (t * HV + head) * V + values, here[None, :] & (j < V)[:, None], 0.0),
        tl.load(gain, (lane < BLOCK) & (t + lane < stop), 0.0),
        tl.load(overlaps + (t * (HV // HEADS_K) + head // HEADS_K) * BLOCK + products, later, 0.0),
    )


@triton.jit
def store_columns(to, columns, t, stop, head, HV, V: tl.constexpr):
    """16 vectors [PV] into a tensor [BT, HV, V] from token t on."""
    x = join_columns(columns, 16)
    i, j = tl.arange(0, BLOCK), tl.arange(0, x.shape[0])
    inside = (t + i < stop)[None, :] & (j < V)[:, None]
    at = place_columns(j, HV * V)
    tl.store(to + (t * HV + head) * V + at, x.to(to.dtype.element_ty), inside)
    return x


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
    S = tl.zeros((PV, PK), tl.float32) if start is None else load_transposed(start + at * K * V, K, PK, V, PV)
    following = load_block(k, v, gamma, overlaps, first, stop, head, HV, K, PK, V, PV, HEADS_K, HEADS_GAMMA)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for block in range(0, blocks):
        t = first + block * BLOCK
        keys, values, gain, products = following
        following = load_block(k, v, gamma, overlaps, t + BLOCK, stop, head, HV, K, PK, V, PV, HEADS_K, HEADS_GAMMA)
        Z = tl.dot(S.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        z, value, with_later = split_columns(Z, 16), split_columns(values, 16), split_columns(products, 16)
        if GRAM:
            values = values.to(tl.float32)
            pairs = tl.trans(tl.reshape(tl.join(Z, values), (PV, 32)))  # z in even rows, v in odd ones
            by_z = split_columns(tl.dot(pairs, Z, input_precision=PRECISION), 16)
            by_v = split_columns(tl.dot(pairs, values, input_precision=PRECISION), 16)
        squares, alongs = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32)
        answered, written = (), ()
        for now in tl.static_range(BLOCK):
            answered += (z[0],)
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
            written += (tl.reshape(write, (PV,)),)
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
        store_columns(answers, answered, t, stop, head, HV, V)
        U = store_columns(u, written, t, stop, head, HV, V)
        r, p, cubed, turn = find_factors(squares, alongs)
        numbers, inside = kept + ((t + lane) * HV + head) * 4, (lane < BLOCK) & (t + lane < stop)
        tl.store(numbers, r, inside)
        tl.store(numbers + 1, p, inside)
        tl.store(numbers + 2, cubed, inside)
        tl.store(numbers + 3, turn, inside)
        S = tl.dot(U.to(keys.dtype), keys, S, input_precision=PRECISION)


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
def add_powers(L, SIZE: tl.constexpr):
    """(I - L)^-1 for L [SIZE, SIZE] whose 16th power is 0."""
    i = tl.arange(0, SIZE)
    total = L + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for _ in tl.static_range(3):
        L = tl.dot(L, L, input_precision="tf32x3")
        total = tl.dot(total, L, total, input_precision="tf32x3")
    return total


@triton.jit(do_not_specialize=["time"])
def block_systems(
    v, gamma, overlaps, answers, kept, through, turned, systems, chunks, time, HV,
    V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
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
    M = add_powers(-A * (gain * p)[None, :], BLOCK)
    N = tl.dot(M, A, input_precision="tf32x3")
    Z = load_columns(answers, t, stop, head, HV, V, PV)
    values = load_columns(v, t, stop, head, HV, V, PV).to(tl.float32)
    ZZ = N * tl.dot(tl.trans(Z), Z, input_precision="tf32x3")
    ZV = N * tl.dot(tl.trans(Z), values, input_precision="tf32x3")
    VZ = N * tl.dot(tl.trans(values), Z, input_precision="tf32x3")
    VV = N * tl.dot(tl.trans(values), values, input_precision="tf32x3")
    of_z = tl.join(ZZ * along[None, :] - ZV * aside[None, :], ZZ * across[None, :])
    of_v = tl.join(VZ * along[None, :] - VV * aside[None, :], VZ * across[None, :])
    L = tl.reshape(tl.permute(tl.join(of_z, of_v), (0, 3, 1, 2)), (32, 32))
    at = tl.program_id(0).to(tl.int64) * HV + head
    j = tl.arange(0, 32)
    tl.store(through + at * 256 + i[:, None] * BLOCK + i[None, :], M)
    tl.store(turned + at * 256 + i[:, None] * BLOCK + i[None, :], N)
    tl.store(systems + at * 1024 + j[:, None] * 32 + j[None, :], add_powers(L, 32))


@triton.jit
def load_block_back(
    k, v, gamma, answers, kept, du, through, turned, systems, t, stop, system, head, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
):  # fmt: skip
    """What the gradients of a block take: keys [16, PK]; z, v and du [PV, 16]; factors [16]; M and N transposed, and what its
    32 inner products are solved with."""
    i, both, here = tl.arange(0, BLOCK), tl.arange(0, 32), t < stop
    transposed = system * 256 + i[None, :] * BLOCK + i[:, None]
    return (
        load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK),
        load_columns(answers, t, stop, head, HV, V, PV),
        load_columns(v, t, stop, head, HV, V, PV),
        load_columns(du, t, stop, head, HV, V, PV),
        load_factors(gamma, kept, t, stop, head, HV, HEADS_GAMMA),
        tl.load(through + transposed, here, 0.0),
        tl.load(turned + transposed, here, 0.0),
        tl.load(systems + system * 1024 + both[:, None] * 32 + both[None, :], here, 0.0),
    )


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
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    L = tl.zeros((PV, PK), tl.float32) if d_end is None else load_transposed(d_end + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    last, first_system = tl.maximum(blocks - 1, 0), m.to(tl.int64) * 4 * HV + head
    following = load_block_back(
        k, v, gamma, answers, kept, du, through, turned, systems, first + last * BLOCK, stop, first_system + last * HV, head, HV,
        K, PK, V, PV, HEADS_K, HEADS_GAMMA,
    )  # fmt: skip
    for step in range(0, blocks):
        block = blocks - 1 - step
        t = first + block * BLOCK
        if (step == 0) | (block % 4 == 3):
            store_transposed(states + ((m + block // 4).to(tl.int64) * HV + head) * K * V, L, K, V)
        keys, Z, values, D, factors, M, N, solution = following
        gain, r, p, along, across, aside = factors
        earlier = tl.maximum(block - 1, 0)
        following = load_block_back(
            k, v, gamma, answers, kept, du, through, turned, systems, first + earlier * BLOCK, stop, first_system + earlier * HV,
            head, HV, K, PK, V, PV, HEADS_K, HEADS_GAMMA,
        )  # fmt: skip
        values = values.to(tl.float32)
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
