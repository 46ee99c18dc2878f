"""What the tokens of a sequence write in 16 bits, by inner products of a block's answers and values, which follow from token to
token. One program per sequence and head goes through blocks of 16 tokens. See the derivation in __init__.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import tokens_of_sequence
from .tokens import BLOCK, SHORTEST, find_factors, load_keys, load_transposed, load_values


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
def store_numbers(address, x, mask):
    """Write x where mask holds, by assembly: the pass of Triton that looks for wider accesses compares every load and store with
    every operation, and those that are unrolled take it most of the time to compile."""
    dtype: tl.constexpr = address.dtype.element_ty
    place = address.to(tl.int64, bitcast=True)
    if dtype == tl.float32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }", "=r,l,f,r",
            [place, x, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        bits = x.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $3, 0; cvt.u16.u32 h, $2; @p st.global.b16 [$1], h; mov.u32 $0, 0; }",
            "=r,l,r,r", [place, bits, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_numbers(address, mask):
    """Numbers in float32, 0 where mask does not hold, by assembly, as `store_numbers`."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$1]; }", "=&f,l,r",
        [address.to(tl.int64, bitcast=True), mask.to(tl.int32)], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_products(overlaps, t, stop, head, HV, HEADS_K: tl.constexpr, BY_ASSEMBLY: tl.constexpr):
    """Of every key of a block [32] the products with later ones: that with key i in lane 2 i, 0 in odd lanes."""
    lane = tl.arange(0, 32)
    row = overlaps + (t * (HV // HEADS_K) + head // HEADS_K) * BLOCK + lane // 2
    here, found = (t + lane // 2 < stop) & (lane % 2 == 0), ()
    for i in tl.static_range(BLOCK):
        address, wanted = row + i * (HV // HEADS_K * BLOCK), here & (lane // 2 > i)
        found += (load_numbers(address, wanted) if BY_ASSEMBLY else tl.load(address, wanted, 0.0),)
    return found


@triton.jit
def load_columns(x, t, stop, head, HV, V: tl.constexpr, PV: tl.constexpr):
    """[PV, 16] of a tensor [BT, HV, V] from token t on: tokens are columns. Offsets are called contiguous along a column alone,
    one number at a time, so that Triton gives every row a lane, where columns are split and joined without an exchange."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    offsets = tl.multiple_of(tl.max_contiguous(j[:, None] + i[None, :] * (HV * V), [32, 1]), [1, 1])
    return tl.load(x + (t * HV + head) * V + offsets, (t + i < stop)[None, :] & (j < V)[:, None], 0.0)


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
    PRECISION: tl.constexpr, BY_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """answers [BT, HV, V]: z; kept [BT, HV, 4]: what `find_factors` finds; u [BT, HV, V]. BY_ASSEMBLY: see `store_numbers`;
    not in the interpreter, which knows none."""
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
        answer_row, write_row = answers + row, u + row
        keys = load_keys(k, t, stop, head, HV, K, PK, HEADS_K, BLOCK)
        values = load_columns(v, t, stop, head, HV, V, PV)
        value = split_columns(values, 16)
        gain = gamma + (t + lane) * (HV // HEADS_GAMMA) + head // HEADS_GAMMA
        gain = tl.load(gain, (lane < BLOCK) & (t + lane < stop), 0.0).to(tl.float32)
        with_later = load_products(overlaps, t, stop, head, HV, HEADS_K, BY_ASSEMBLY)
        Z = tl.dot(S.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        z = split_columns(Z, 16)
        both = tl.reshape(tl.join(Z, values.to(tl.float32)), (PV, 32))  # z in even columns, v in odd ones
        both = split_columns(tl.dot(tl.trans(both), both, input_precision=PRECISION), 32)
        by_z, by_v = both[::2], both[1::2]
        square, along = take_lane(by_z[0], 0), take_lane(by_v[0], 0)
        squares, alongs = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32)
        for now in tl.static_range(BLOCK):
            answer = tl.reshape(z[0], (PV // 32, 32))
            wanted = tl.reshape(value[now].to(tl.float32), (PV // 32, 32))
            squares, alongs = tl.where(lane == now, square, squares), tl.where(lane == now, along, alongs)
            a, b = find_shares(square, along, take_lane(gain, now))
            here = inside & (now < left)
            if BY_ASSEMBLY:
                store_numbers(answer_row + now * stride, answer, here)
            else:
                tl.store(answer_row + now * stride, answer, here)
            write = take_lane(a, now)[None, :] * wanted - take_lane(b, now)[None, :] * answer
            if BY_ASSEMBLY:
                store_numbers(write_row + now * stride, write, here)
            else:
                tl.store(write_row + now * stride, write, here)
            rest = ()
            for i in tl.static_range(1, BLOCK - now):
                product = take_lane(with_later[now], 2 * (now + i))
                rest += (z[i] + tl.reshape(product[None, :] * write, (PV,)),)
            z = rest
            if now < BLOCK - 1:
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
