"""A state that only adds up: what every segment adds, and from that the state at every segment's border."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import pieces_of_sequence, program_segment
from ..common.tiles import load_gate, load_rows

AHEAD = tl.constexpr(4)  # segments that are loaded at once


@triton.jit
def load_float_rows(x, first, live, head, HV, columns, K: tl.constexpr, HEADS: tl.constexpr):
    """`load_rows` in float32."""
    return load_rows(x, first, live, head, HV, columns, K, HEADS).to(tl.float32)


@triton.jit
def load_divisors(D, first, live, head, HV):
    """d of a chunk's tokens [64], D [BT, HV]; 1 where there is no token."""
    return tl.load(D + first * HV + head + tl.arange(0, 64) * HV, live, 1.0)


@triton.jit
def load_matrix(x, matrix, rows, columns, K: tl.constexpr):
    """[rows, columns] of one of the matrices x [M, HV, K, K]."""
    x += matrix * K * K  # a scalar in front, so that the offsets of a tile are small numbers
    return tl.load(x + rows[:, None] * K + columns[None, :], (rows < K)[:, None] & (columns < K)[None, :], 0.0)


@triton.jit
def split_first_bits(x):
    """The first eight bits of float32 numbers in bfloat16, and the rest. A conversion, which rounds, takes many times as long."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def precise_dot(x, y, out, PRECISION: tl.constexpr):
    """out + x y. "tf32x3" as Triton has it, without its look for NaN between the products: an infinity gives NaN. `out` comes
    last, because every step of a product cuts off bits of a sum that is large already."""
    if PRECISION == "tf32x3":
        high_x, high_y = round_to_tf32(x), round_to_tf32(y)
        found = tl.dot(x - high_x, high_y, input_precision="tf32")
        found = tl.dot(high_x, y - high_y, found, input_precision="tf32")
        out += tl.dot(high_x, high_y, found, input_precision="tf32")
    else:
        out = tl.dot(x, y, out, input_precision=PRECISION)
    return out


@triton.jit
def round_to_tf32(x):
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def exact_dot(x, y, out, PRECISION: tl.constexpr):
    """out + x y, with "tf32x3" in the precision of float32 where one factor comes in that of the inputs: the other, in
    float32, as three bfloat16 numbers."""
    if x.dtype == tl.bfloat16 and y.dtype == tl.bfloat16:
        out = tl.dot(x, y, out)
    elif x.dtype == tl.bfloat16 and PRECISION == "tf32x3":
        high, rest = split_first_bits(y)
        middle, rest = split_first_bits(rest)
        low, rest = split_first_bits(rest)
        out = tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low, out)))
    elif y.dtype == tl.bfloat16 and PRECISION == "tf32x3":
        high, rest = split_first_bits(x)
        middle, rest = split_first_bits(rest)
        low, rest = split_first_bits(rest)
        out = tl.dot(high, y, tl.dot(middle, y, tl.dot(low, y, out)))
    else:
        out = precise_dot(x.to(tl.float32), y.to(tl.float32), out, PRECISION)
    return out


@triton.jit
def dot_in_two(x, y, out, PRECISION: tl.constexpr):
    """out + x y. Where one factor comes in bfloat16, the other, in float32, is the sum of two such numbers."""
    if x.dtype == tl.bfloat16 and y.dtype == tl.float32:
        high, rest = split_first_bits(y)
        out = tl.dot(x, high, tl.dot(x, rest.to(tl.bfloat16), out))
    elif y.dtype == tl.bfloat16 and x.dtype == tl.float32:
        high, rest = split_first_bits(x)
        out = tl.dot(high, y, tl.dot(rest.to(tl.bfloat16), y, out))
    else:
        out = tl.dot(x, y, out, input_precision=PRECISION)
    return out


@triton.jit
def rounded_dot(x, y, out, PRECISION: tl.constexpr):
    """out + x y. Where one factor has 16 bits, the other is rounded to as many."""
    if x.dtype == tl.float32 and y.dtype == tl.float32:
        out = precise_dot(x, y, out, PRECISION)
    elif x.dtype == tl.float32:
        out = tl.dot(x.to(y.dtype), y, out)
    else:
        out = tl.dot(x, y.to(x.dtype), out)
    return out


@triton.jit(do_not_specialize=["time"])
def segment_sums(
    x, y, divisor, gain, sums, segments, time,
    HV: tl.constexpr, K: tl.constexpr, PK: tl.constexpr, BK: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr,
    HEADS_GAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums [P, HV, K, K]: of every segment sum_t gain_t x_t x_t^T, or where y is given sum_t (x_t y_t^T + y_t x_t^T) / divisor_t,
    BK columns per program. x [BT, HV // HEADS, K], y [BT, HV, K], divisor [BT, HV] or None."""
    p, head, first, count, _ = program_segment(segments, time, LENGTH)
    if count == 0:
        return
    i = tl.arange(0, 64)
    r, c = tl.arange(0, PK), tl.program_id(2) * BK + tl.arange(0, BK)
    out = tl.zeros((PK, BK), tl.float32)
    for done in range(0, count, 64):
        start, live = first + done, i < count - done
        left = load_rows(x, start, live, head, HV, r, K, HEADS)
        right = load_rows(x, start, live, head, HV, c, K, HEADS)
        if y is None:
            if gain is not None:
                right = right.to(tl.float32) * load_gate(gain, start, live, head, HV, HEADS_GAIN)[:, None]
            out = exact_dot(tl.trans(left), right, out, PRECISION)
        else:
            other = load_rows(y, start, live, head, HV, r, K, 1)
            columns = load_rows(y, start, live, head, HV, c, K, 1)
            if divisor is not None:
                share = 1.0 / load_divisors(divisor, start, live, head, HV)
                other, columns = other * share[:, None], columns * share[:, None]
            out = tl.dot(tl.trans(left), columns.to(x.dtype.element_ty), out, input_precision=PRECISION)
            out = tl.dot(tl.trans(other.to(x.dtype.element_ty)), right, out, input_precision=PRECISION)
    at = (p.to(tl.int64) * HV + head) * K * K
    tl.store(sums + at + r[:, None] * K + c[None, :], out, (r < K)[:, None] & (c < K)[None, :])


@triton.jit(do_not_specialize=["time"])
def scan_sums(
    start, sums, end, cu_seqlens, time, HV,
    K: tl.constexpr, LENGTH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns `sums` into the state at every segment's start, from `start` [N, HV, K, K], and leaves that after the last in `end`,
    both in float64. BACK: into H at every segment's end, where start and end are the gradients of the states after and before
    the sequence."""
    n, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    low, count = pieces_of_sequence(cu_seqlens, n, time, LENGTH, 0)
    e = part * BLOCK + tl.arange(0, BLOCK)
    inside = e < K * K
    at_state = (n.to(tl.int64) * HV + head) * K * K
    total = tl.zeros((BLOCK,), tl.float64)
    if start is not None:
        total = tl.load(start + at_state + e, inside, 0.0).to(tl.float64)
        if BACK:
            total = -(total + tl.load(start + at_state + e % K * K + e // K, inside, 0.0).to(tl.float64))
    for step in range(0, count, AHEAD):
        ahead = ()
        for k in tl.static_range(AHEAD):
            m = (low + count - 1 - step - k) if BACK else (low + step + k)
            at = sums + (m.to(tl.int64) * HV + head) * K * K
            ahead += (tl.load(at + e, inside & (step + k < count), 0.0),)
        for k in tl.static_range(AHEAD):
            m = (low + count - 1 - step - k) if BACK else (low + step + k)
            at = sums + (m.to(tl.int64) * HV + head) * K * K
            tl.store(at + e, total.to(tl.float32), inside & (step + k < count))
            total += ahead[k].to(tl.float64)
    if end is not None:
        tl.store(end + at_state + e, -0.5 * total if BACK else total, inside)
