"""What the launches by chunks share (encode, similarity): where a chunk lies, its vectors and steps, products."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
from .forward import EVERY, LEAST_DECAY, TILE, bound_below


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
        first = tl.load(blocks + 6 * m).to(tl.int64)
        count = tl.load(blocks + 6 * m + 1) - first.to(tl.int32)
        sequence = tl.load(blocks + 6 * m + 3).to(tl.int64)
        is_first = (tl.load(blocks + 6 * m + 4) & 1) > 0
    return first, count, sequence, is_first


@triton.jit
def load_block_rows(x, first, count, head, HV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A chunk's vectors [16, BLOCK] of x [BT, HV, WIDTH], 0 past the last token."""
    token, channel = tl.arange(0, EVERY)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = token < count if WIDTH == BLOCK else (token < count) & (channel < WIDTH)
    return tl.load(x + (first * HV + head) * WIDTH + channel + token * (HV * WIDTH), inside, 0.0)


@triton.jit
def take_row(tile, token, t: tl.constexpr):
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
def inverse_squares(per_square, token, is_first):
    """1 / n^2 before every step of a chunk, from that before the first step of the sequence."""
    return tl.where((token == 0) & is_first, per_square, tl.where(per_square > 0, 1.0, 0.0))


@triton.jit
def find_step_again(key, gain, d, b, per_square, square, OBJECTIVE: tl.constexpr, dtype: tl.constexpr):
    """Of the steps of a chunk, from b and |h|^2: f, w, the error c, gamma / n^2, decay, 1 / m, |h|^2 - b^2 times w / m, and what
    the gradient of b takes of A and of D. key, gain, d: as they are in memory; d may be None."""
    gain = to_float_or_nan(gain) * per_square
    d = gain * 0 + 1 if d is None else bound_below(to_float_or_nan(d), LEAST_DECAY)
    error = to_float_or_nan(key) - b if OBJECTIVE == "encode" else to_float_or_nan(key)
    a = gain * error
    across = bound_below(square - b * b, 0.0)
    inverse = inverse_root(d * d + a * a * across, dtype)
    F, W = (d - a * b) * inverse, a * inverse
    across *= W * inverse
    A_weight, D_weight = W * (W * b * F - 1), W * W * W * b
    if OBJECTIVE == "encode":
        A_weight += gain * (inverse * b + across * F)
        D_weight -= gain * (inverse - across * W)
    return F, W, error, gain, d, inverse, across, A_weight, D_weight


@triton.jit
def split_in_two(a, dtype: tl.constexpr):
    """Numbers of 16 bits whose difference is a."""
    if dtype == tl.bfloat16:  # cut off, not rounded: rounding one number at a time is slow
        bits = a.to(tl.int32, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        rest = (bits & -65536).to(tl.float32, bitcast=True) - a
    else:
        high = a.to(dtype)
        rest = high.to(tl.float32) - a
    return high, rest.to(dtype)


@triton.jit
def multiply_precisely(a, b, dtype: tl.constexpr):
    """a b of float32 numbers a and of numbers b in the inputs' dtype, a to twice the digits of that dtype."""
    if dtype == tl.float32:
        found = tl.dot(a, b, input_precision="tf32x3")
    else:
        high, rest = split_in_two(a, dtype)
        # The sign is turned over where there are fewer numbers.
        found = tl.dot(high, b) - tl.dot(rest, b) if b.shape[1] < a.shape[1] else tl.dot(-rest, b, tl.dot(high, b))
    return found


@triton.jit
def slot_exists(token, slot, count, K: tl.constexpr):
    """Which of a chunk's numbers of slots [16, TILE] there are."""
    return (token < count) & (slot >= 0) if ((TILE - 1) & K) == 0 else (token < count) & (slot < K)


@triton.jit
def load_slots(x, place, token, slot, count, HV: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr):
    """A chunk's numbers of slots [16, TILE], of x [BT, HV // HEADS, K], as they are in memory."""
    return tl.load(x + place // HEADS * K + slot + token * (HV // HEADS * K), slot_exists(token, slot, count, K), 0.0)


@triton.jit
def load_tokens(x, place, token, count, HV: tl.constexpr, HEADS: tl.constexpr, other):
    """A chunk's numbers [16, 1] of x [BT, HV // HEADS], as they are in memory."""
    return tl.load(x + place // HEADS + token * (HV // HEADS), token < count, other)
