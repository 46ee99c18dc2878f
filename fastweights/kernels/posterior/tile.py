"""Device functions of a tile of the memory: all key channels, or some, by 16 value columns of M and J, held in registers.

The key channels come in parts of 8, two parts of every 16 channels: one with the even, one with the odd ones. So no thread is
idle at 48 or 96 channels, and a thread loads two neighbouring channels at once. A tuple holds one tensor [8, 16] per part: 8 by 4
lanes of a warp, four columns per thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import halve
from ..common.math import clamp_decay, infinite_to_nan, to_float_or_nan


@triton.jit
def part_channels(first_key, part: tl.constexpr):
    return first_key + 16 * (part // 2) + part % 2 + 2 * tl.arange(0, 8)


@triton.jit
def load_tile(x, state, first_key, column, given, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr):
    """Tile of the state number `state` of x [.., K, V], in float32, infinities as NaN; zeros where the state is not `given`."""
    tile = ()
    for part in tl.static_range(PARTS):
        c = part_channels(first_key, part)
        inside = (c < K)[:, None] & (column < V)[None, :] & given
        loaded = tl.load(x + state * (K * V) + c[:, None] * V + column[None, :], inside, 0.0)
        tile = tile + (to_float_or_nan(loaded),)
    return tile


@triton.jit
def store_tile(x, state, first_key, column, tile, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        c = part_channels(first_key, part)
        inside = (c < K)[:, None] & (column < V)[None, :]
        tl.store(x + state * (K * V) + c[:, None] * V + column[None, :], infinite_to_nan(tile[part]), inside)


@triton.jit
def scale_tile(tile, x, PARTS: tl.constexpr):
    out = ()
    for part in tl.static_range(PARTS):
        out = out + (x * tile[part],)
    return out


@triton.jit
def load_rows(x, at, first_key, K: tl.constexpr, PARTS: tl.constexpr):
    """Those of the K numbers from x + at on that belong to the tile, as `unpack_rows` takes them."""
    rows = ()
    if K % 2 == 0 and x.dtype.element_ty.primitive_bitwidth == 16:
        pairs = (x + at).to(tl.pointer_type(tl.int32))
        for pair in tl.static_range(PARTS // 2):
            c = first_key // 2 + 8 * pair + tl.arange(0, 8)
            rows = rows + (tl.load(pairs + c, c < K // 2, 0),)
    else:
        for part in tl.static_range(PARTS):
            c = part_channels(first_key, part)
            rows = rows + (tl.load(x + at + c, c < K, 0.0),)
    return rows


@triton.jit
def unpack_pair(two, like):
    """Two neighbouring numbers of 16 bits from one of 32, in float32."""
    if like.dtype.element_ty == tl.bfloat16:  # the upper half of a float32
        even, odd = (two << 16).to(tl.float32, bitcast=True), (two & -65536).to(tl.float32, bitcast=True)
    else:
        even = two.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (two >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def load_columns(x, at, first_column, V: tl.constexpr):
    """16 of the V numbers from x + at on, as `unpack_columns` takes them. Numbers of 16 bits are loaded by pairs: a loop that
    holds them until its next step would else take the loaded words apart at once, and wait for them."""
    if V % 2 == 0 and x.dtype.element_ty.primitive_bitwidth == 16:
        c = first_column // 2 + tl.arange(0, 8)
        columns = tl.load((x + at).to(tl.pointer_type(tl.int32)) + c, c < V // 2, 0)
    else:
        c = first_column + tl.arange(0, 16)
        columns = tl.load(x + at + c, c < V, 0.0)
    return columns


@triton.jit
def unpack_columns(raw, like, V: tl.constexpr):
    """[16] in float32."""
    if V % 2 == 0 and like.dtype.element_ty.primitive_bitwidth == 16:
        even, odd = unpack_pair(raw, like)
        columns = tl.reshape(tl.join(even, odd), (16,))
    else:
        columns = raw.to(tl.float32)
    return columns


@triton.jit
def unpack_rows(raw, like, K: tl.constexpr, PARTS: tl.constexpr):
    """By parts, in float32."""
    rows = ()
    if K % 2 == 0 and like.dtype.element_ty.primitive_bitwidth == 16:
        for pair in tl.static_range(PARTS // 2):
            rows = rows + unpack_pair(raw[pair], like)
    else:
        for part in tl.static_range(PARTS):
            rows = rows + (raw[part].to(tl.float32),)
    return rows


@triton.jit
def load_inputs(
    pointers, dw, i, column, first_key, HV, K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
):  # fmt: skip
    """The token i after the one that the pointers show to, as it lies in memory: loops load it a step before `unpack_token` takes
    it. pointers: q, k, v, beta, g and do. dw may be None."""
    q, k, v, beta, g, do = pointers
    live = column < V
    value = tl.load(v + i * (HV * V) + column, live, 0.0)
    return (
        load_rows(q, i * (HV // HEADS_K * K), first_key, K, PARTS),
        load_rows(k, i * (HV // HEADS_K * K), first_key, K, PARTS),
        value,
        tl.load(beta + i * (HV // HEADS_BETA * V) + column, live, 0.0),
        tl.load(g + i * (HV // HEADS_G)),
        tl.load(do + i * (HV * V) + column, live, 0.0),
        value if dw is None else tl.load(dw + i * (HV * V) + column, live, 0.0),
    )


@triton.jit
def unpack_token(token, like, K: tl.constexpr, PARTS: tl.constexpr):
    """q, k (by parts), v, beta, the log decay in base 2, do and dw."""
    q, k, v, beta, g, do, dw = token
    query, key = unpack_rows(q, like, K, PARTS), unpack_rows(k, like, K, PARTS)
    gain = mark_infinite(beta.to(tl.float32))
    return query, key, v.to(tl.float32), gain, clamp_decay(g), do.to(tl.float32), dw.to(tl.float32)


@triton.jit
def mark_infinite(x):
    """x, infinities as NaN, in one instruction: an infinite importance would read as a mean and variance of zero."""
    return tl.fma(x, 0.0, x)


@triton.jit
def write(M, J, key, value, gain, PARTS: tl.constexpr):
    """The memory after a token."""
    new_M, new_J = (), ()
    for part in tl.static_range(PARTS):
        k = key[part]
        new_M = new_M + (M[part] + k[:, None] * value[None, :],)
        new_J = new_J + (J[part] + (k * k)[:, None] * gain[None, :],)
    return new_M, new_J


@triton.jit
def inverse_importance(importance, PRECISION: tl.constexpr):
    """1 / importance."""
    if PRECISION == "tf32":
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [importance], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / importance
    return y


@triton.jit
def address(x, at):
    return (x + at).to(tl.int64, bitcast=True)


@triton.jit
def prefetch_lanes(
    q, k, v, beta, t, first_column, head, HV, K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_BETA: tl.constexpr,
):  # fmt: skip
    """What each lane of a warp fetches ahead: 32 bytes of q or k (up to 8 lanes each), or of the tile's columns of v or beta.
    Their addresses at token t, and the bytes per token."""
    lane = tl.arange(0, 32)
    which, i = lane // 8, lane % 8 * 16
    head_k = head // HEADS_K * K + tl.minimum(i, K - 1)
    column = tl.minimum(first_column + i, tl.minimum(first_column + 15, V - 1))
    at_k = t * (HV // HEADS_K * K) + head_k
    at_v = t * (HV * V) + head * V + column
    at_beta = t * (HV // HEADS_BETA * V) + head // HEADS_BETA * V + column
    start = tl.where(which == 0, address(q, at_k), address(k, at_k))
    start = tl.where(which == 2, address(v, at_v), tl.where(which == 3, address(beta, at_beta), start))
    numbers = tl.where(which < 2, HV // HEADS_K * K, tl.where(which == 2, HV * V, HV // HEADS_BETA * V))
    SIZE_V: tl.constexpr = v.dtype.element_ty.primitive_bitwidth // 8
    SIZE_BETA: tl.constexpr = beta.dtype.element_ty.primitive_bitwidth // 8
    SIZE_K: tl.constexpr = k.dtype.element_ty.primitive_bitwidth // 8
    return start, numbers * tl.where(which < 2, SIZE_K, tl.where(which == 2, SIZE_V, SIZE_BETA))


@triton.jit
def sum_over_eight_lanes(x, first_column):
    """The sums of x [8, 16] over its rows, one of its four columns in each lane: sums and their columns [1, 2, 2, 4]."""
    odd = tl.arange(0, 2)[None, None, :, None] > 0
    right = tl.arange(0, 2)[None, :, None, None] > 0
    even_columns, odd_columns = tl.split(tl.reshape(x, (2, 2, 2, 4, 2, 2)))
    left, right_column = tl.split(halve(even_columns, odd_columns, 2, odd[:, :, :, :, None]))
    total = tl.sum(halve(left, right_column, 1, right), 0, keep_dims=True)
    place = 2 * tl.arange(0, 2)[None, :, None, None] + tl.arange(0, 2)[None, None, :, None]
    column = first_column + place + 4 * tl.arange(0, 4)[None, None, None, :]
    return total, column
