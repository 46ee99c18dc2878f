"""Device functions of a block of four tokens, whose decays expand into matrix products: see the derivation in __init__.py.

Vectors over channels, [PK] of keys or [BV] of values, come in tuples: one per token, or one per product of a subset of the
block's tokens. Subset m has the token r where bit r of m is set. A tuple becomes an operand of a product by `stack`, and a
result a tuple by `unstack`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import is_bad, reciprocal, to_float_or_nan
from ..common.tiles import token_address

SHORTEST = tl.constexpr(1e-37)  # of L: a shorter key leaves what is there


@triton.jit
def load_four(x, first, left, head, HV, c, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Four tokens' numbers as they lie in memory, 0 where fewer are left."""
    out = ()
    for r in tl.static_range(4):
        out = out + (tl.load(token_address(x, first + r, head, HV, HEADS, WIDTH) + c, (c < WIDTH) & (r < left), 0.0),)
    return out


@triton.jit
def scaled(raw, scale):
    """In float32, infinities as NaN."""
    out = ()
    for r in tl.static_range(4):
        out = out + (to_float_or_nan(raw[r]) * scale,)
    return out


@triton.jit
def join_halves(parts, HALF: tl.constexpr):
    joined = ()
    for i in tl.static_range(HALF):
        joined = joined + (tl.join(parts[i], parts[i + HALF]),)
    return joined


@triton.jit
def stack(parts, COUNT: tl.constexpr, dtype: tl.constexpr):
    """[channels, COUNT] from a tuple of COUNT vectors, 16 or 32."""
    C: tl.constexpr = parts[0].shape[0]
    for level in tl.static_range(5 if COUNT == 32 else 4):
        parts = join_halves(parts, COUNT >> (level + 1))
    return tl.reshape(parts[0], (C, COUNT)).to(dtype)


@triton.jit
def unstack(x, COUNT: tl.constexpr):
    """A tuple of the columns of x [channels, COUNT], 16 or 32."""
    C: tl.constexpr = x.shape[0]
    shape: tl.constexpr = (C, 2, 2, 2, 2, 2) if COUNT == 32 else (C, 2, 2, 2, 2)
    parts = (tl.reshape(x, shape),)
    for level in tl.static_range(5 if COUNT == 32 else 4):
        lower, upper = (), ()
        for i in tl.static_range(1 << level):
            even, odd = tl.split(parts[i])
            lower, upper = lower + (even,), upper + (odd,)
        parts = lower + upper
    return parts


@triton.jit
def four_sums(x):
    """The sum over channels of each of four vectors."""
    C: tl.constexpr = x[0].shape[0]
    both = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    even, odd = tl.split(tl.reshape(tl.sum(tl.reshape(both, (C, 4)), 0), (2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def filled_like(x, value: tl.constexpr):
    """A vector of one number, laid out as x, which Gluon would have to be told."""
    return tl.where(x == x, value, value)


@triton.jit
def subset_products(x):
    """The product of every subset of four vectors, 16."""
    out = (filled_like(x[0], 1.0),)
    for r in tl.static_range(4):
        more = ()
        for m in tl.static_range(1 << r):
            more = more + (out[m] * x[r],)
        out = out + more
    return out


@triton.jit
def without_empty(products):
    """The same with 0 for the empty subset."""
    out = (filled_like(products[0], 0.0),)
    for m in tl.static_range(1, 16):
        out = out + (products[m],)
    return out


@triton.jit
def write_products(written, products):
    """What token s writes times every subset of the tokens after it, s by s: 15 and a zero."""
    out = ()
    for s in tl.static_range(4):
        for h in tl.static_range(8 >> s):
            out = out + (written[s] * products[(2 * h) << s],)
    return out + (filled_like(written[0], 0.0),)


@triton.jit
def read_products(read, products):
    """What token t reads times every subset of the tokens up to it, at number 2^(t+1) and after: two zeros and 30."""
    out = (filled_like(read[0], 0.0), filled_like(read[0], 0.0))
    for t in tl.static_range(4):
        for m in tl.static_range(2 << t):
            out = out + (read[t] * products[m],)
    return out


@triton.jit
def stack_tokens(x, dtype: tl.constexpr):
    """[channels, 16]: the four tokens, then zeros."""
    zero = tl.zeros(x[0].shape, tl.float32)
    for _ in tl.static_range(12):
        x = x + (zero,)
    return stack(x, 16, dtype)


@triton.jit
def apart_bad(x):
    """Four vectors with 0 in the place of bad numbers, which a product would hand to earlier tokens; and what marks tokens from
    the first bad one on: NaN, else 0."""
    clean, marks, total = (), (), 0.0
    for t in tl.static_range(4):
        bad = is_bad(x[t])
        total += tl.where(bad, float("nan"), 0.0)
        clean, marks = clean + (tl.where(bad, 0.0, x[t]),), marks + (total,)
    return clean, marks


@triton.jit
def sees_write():
    """Which write s [16, 1] a read's product [1, 32] takes along: token t that of s <= t, if all tokens of the subset come
    after s."""
    after = 2 << (tl.arange(0, 16)[:, None] % 4)
    number = tl.arange(0, 32)[None, :]
    return ((number & (after - 1)) == 0) & (number >= after) & (tl.arange(0, 16)[:, None] < 4)


@triton.jit
def key_side(raw, PRECISION: tl.constexpr):
    """Of four keys: the keys, 1 / L or 0, L, and the products of -k^2 / L of every subset."""
    keys, squares = scaled(raw, 1.0), ()
    for r in tl.static_range(4):
        squares = squares + (keys[r] * keys[r],)
    lengths, inverse, factors = four_sums(squares), (), ()
    for r in tl.static_range(4):
        by = tl.where(lengths[r] < SHORTEST, 0.0, reciprocal(lengths[r], PRECISION))
        inverse, factors = inverse + (by,), factors + (-squares[r] * by,)
    return keys, inverse, lengths, subset_products(factors)


@triton.jit
def value_side(raw_v, raw_beta, lengths, PRECISION: tl.constexpr):
    """Of four tokens: the values, least, e, u = e v, and the products of e L of every subset."""
    values, gains = scaled(raw_v, 1.0), scaled(raw_beta, 1.0)
    least, e, u, factors = (), (), (), ()
    for r in tl.static_range(4):
        kept = reciprocal(1 + gains[r] * lengths[r], PRECISION)
        least, e = least + (kept,), e + (gains[r] * kept,)
        u, factors = u + (e[r] * values[r],), factors + (e[r] * lengths[r],)
    return values, least, e, u, subset_products(factors)


@triton.jit
def read_results(products, found):
    """What each token reads: the sum over its subsets."""
    out = ()
    for t in tl.static_range(4):
        total = found[2 << t]
        for m in tl.static_range(1, 2 << t):
            total += products[m] * found[(2 << t) + m]
        out = out + (total,)
    return out


@triton.jit
def write_results(products, found, also):
    """The gradient of what each token writes, with what `also` adds."""
    out = ()
    for s in tl.static_range(4):
        total = also[s]
        for h in tl.static_range(8 >> s):
            total += products[(2 * h) << s] * found[16 - (16 >> s) + h]
        out = out + (total,)
    return out


@triton.jit
def factor_gradients(products, read, written, found, found_read, found_written):
    """The gradients of a side's four factors from those of all its products."""
    sums = ()
    for m in tl.static_range(16):
        total = found[m]
        for t in tl.static_range(4):
            if m < (2 << t):
                total += read[t] * found_read[(2 << t) + m]
            if m % (2 << t) == 0:
                total += written[t] * found_written[16 - (16 >> t) + (m >> (t + 1))]
        sums = sums + (total,)
    out = ()
    for r in tl.static_range(4):
        total = sums[1 << r]
        for m in tl.static_range(1, 16):
            if m & (1 << r) == 0:
                total += products[m] * sums[m + (1 << r)]
        out = out + (total,)
    return out
