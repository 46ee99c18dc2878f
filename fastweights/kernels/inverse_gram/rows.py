"""The elimination of 16 rows by one warp: lanes hold rows, and the columns are 16 vectors."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)


@triton.jit
def split_columns(x):
    """The columns of x [16, 16] as a tuple of vectors."""
    parts = (tl.reshape(x, (16, 2, 2, 2, 2)),)
    for _ in tl.static_range(4):  # from the lowest bit of a column's number to the highest
        even, odd = (), ()
        for k in tl.static_range(len(parts)):
            low, high = tl.split(parts[k])
            even += (low,)
            odd += (high,)
        parts = even + odd
    return parts


@triton.jit
def join_columns(columns):
    """[16, 16] of its columns: `split_columns` undone."""
    parts = columns
    for _ in tl.static_range(4):
        found = ()
        for k in tl.static_range(len(parts) // 2):
            found += (tl.join(parts[k], parts[k + len(parts) // 2]),)
        parts = found
    return tl.reshape(parts[0], (16, 16))


@triton.jit
def take_number(x, j: tl.constexpr):
    """Number j of a vector of 16, in all lanes."""
    return tl.gather(x, tl.full((16,), j, tl.int32), 0)


@triton.jit
def eliminate_rows(products, gains, OWN: tl.constexpr):
    """For rows r and p_ij = r_i.u_j, `products` [16, 16] of which i >= j counts: r_t <- r_t - sum_{j < t} w_j p_tj r_j with
    d_t = gain_t p_tt, plus 1 with OWN, and w_t = gain_t / d_t. Returns T transposed, where T r are the new rows, d and w [16].
    gains [16], 1 when None."""
    i = tl.arange(0, ROWS)
    left = split_columns(products)
    turned = ()
    for k in tl.static_range(ROWS):
        turned += (tl.where(i == k, 1.0, 0.0),)
    done, divisors, weights = (), tl.full((16,), 1.0, tl.float32), tl.full((16,), 0.0, tl.float32)
    for j in tl.static_range(ROWS):
        column, row = left[0], turned[0]
        divisor, weight = take_number(column, j), 1.0
        if gains is not None:
            weight = take_number(gains, j)
            divisor *= weight
        if OWN:
            divisor += 1.0
        weight = weight / divisor
        divisors, weights = tl.where(i == j, divisor, divisors), tl.where(i == j, weight, weights)
        scaled, scaled_row = weight * column, weight * row
        rest, rest_turned = (), ()
        for k in tl.static_range(1, ROWS - j):
            factor = take_number(column, j + k)
            rest += (left[k] - factor * scaled,)
            rest_turned += (turned[k] - factor * scaled_row,)
        done += (row,)
        left, turned = rest, rest_turned
    return join_columns(done), divisors, weights
