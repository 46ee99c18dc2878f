"""Device functions of a tile of the memory: all key channels by some value columns of M and J, held in registers.

The key channels come in parts of P = 16 (fewer where a head is narrower), so that no thread is idle at 48 or 96 channels. A tuple
holds one tensor [P, BV] per part.

The importance I = J + prior is held in place of J for 16-bit inputs, which saves an addition per element and token. float32
inputs hold J, which then keeps its precision beside a large prior: `held` is prior or 0, `rest` (1 - a) held.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import clamped, float_or_nan, or_nan


@triton.jit
def load_tile(
    x, state, first_key, column, given, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr
):
    """Tile of the state number `state` of x [.., K, V], in float32, infinities as NaN; zeros where the state is not `given`."""
    tile = ()
    for part in tl.static_range(PARTS):
        c = first_key + part * P + tl.arange(0, P)
        inside = (c < K)[:, None] & (column < V)[None, :] & given
        loaded = tl.load(x + state * (K * V) + c[:, None] * V + column[None, :], inside, 0.0)
        tile = tile + (float_or_nan(loaded),)
    return tile


@triton.jit
def store_tile(
    x, state, first_key, column, tile, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr
):
    for part in tl.static_range(PARTS):
        c = first_key + part * P + tl.arange(0, P)
        inside = (c < K)[:, None] & (column < V)[None, :]
        tl.store(x + state * (K * V) + c[:, None] * V + column[None, :], or_nan(tile[part]), inside)


@triton.jit
def add_to(tile, x, PARTS: tl.constexpr):
    out = ()
    for part in tl.static_range(PARTS):
        out = out + (tile[part] + x,)
    return out


@triton.jit
def load_rows(x, at, first_key, K, P: tl.constexpr, PARTS: tl.constexpr):
    """Those of the K numbers from x + at on that belong to the tile, by parts."""
    rows = ()
    for part in tl.static_range(PARTS):
        c = first_key + part * P + tl.arange(0, P)
        rows = rows + (tl.load(x + at + c, c < K, 0.0).to(tl.float32),)
    return rows


@triton.jit
def decay_of(g, at, here):
    return tl.exp2(clamped(tl.load(g + at, here, 0.0)))


@triton.jit
def load_token(
    k, v, beta, g, t, here, column, first_key, head, HV,
    K: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
):  # fmt: skip
    """What a token writes; nothing, and no decay, where it is not `here`."""
    a = decay_of(g, t * (HV // HEADS_G) + head // HEADS_G, here)
    key = load_rows(k, (t * (HV // HEADS_K) + head // HEADS_K) * K, first_key, tl.where(here, K, 0), P, PARTS)
    live = (column < V) & here
    value = tl.load(v + (t * HV + head) * V + column, live, 0.0).to(tl.float32)
    gain = tl.load(beta + (t * (HV // HEADS_BETA) + head // HEADS_BETA) * V + column, live, 0.0).to(tl.float32)
    return key, value, or_nan(gain), a  # an infinite importance would read as zero


@triton.jit
def write(M, J, key, value, gain, a, rest, PARTS: tl.constexpr):
    """The memory after a token."""
    new_M, new_J = (), ()
    for part in tl.static_range(PARTS):
        k = key[part]
        new_M = new_M + (a * M[part] + k[:, None] * value[None, :],)
        new_J = new_J + (a * J[part] + ((k * k)[:, None] * gain[None, :] + rest),)
    return new_M, new_J


@triton.jit
def spread(J, prior, PRECISION: tl.constexpr):
    """1 / (J + prior) of one part."""
    if PRECISION == "tf32":
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [J], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / (J + prior)
    return y


@triton.jit
def prefetch(x, at, count, COUNT: tl.constexpr, PRECISION: tl.constexpr):
    """Fetch the `count` numbers from x + at on into the L1 cache, 32 bytes per thread. float32, which the interpreter runs too,
    does without."""
    if PRECISION == "tf32":
        STRIDE: tl.constexpr = 32 // (x.dtype.element_ty.primitive_bitwidth // 8)
        SIZE: tl.constexpr = triton.next_power_of_2((COUNT + STRIDE - 1) // STRIDE)
        i = tl.minimum(tl.arange(0, SIZE) * STRIDE, count - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [(x + at + i).to(tl.int64, bitcast=True)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_token(
    q, k, v, beta, t, first_column, head, HV, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.minimum(V - first_column, BV)
    at_key = (t * (HV // HEADS_K) + head // HEADS_K) * K
    prefetch(k, at_key, K, K, PRECISION)
    prefetch(q, at_key, K, K, PRECISION)
    prefetch(v, (t * HV + head) * V + first_column, columns, BV, PRECISION)
    prefetch(beta, (t * (HV // HEADS_BETA) + head // HEADS_BETA) * V + first_column, columns, BV, PRECISION)
