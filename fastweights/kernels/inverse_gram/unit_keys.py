"""Keys and write keys of unit length, and what divides the answers of a memory: the sums of all keys times the query.

    khat = k / |k|      alpha = y / |y|      z_t = z_{t-1} + k_t      divisor_t = max(z_t.q_t, eps)

The sums are found as states are: what every chunk adds, then a pass over the chunks of a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import any_so_far, is_bad, zero_where
from ..common.packing import live_tokens, pieces_of_sequence, program_chunk
from ..common.tiles import load_rows, row_places
from .sums import exact_dot, load_float_rows

AHEAD = tl.constexpr(32)  # chunks of a sequence that are added up at once


@triton.jit
def row_lengths(x):
    """Of rows; 1 where it is 0."""
    squares = tl.sum(x * x, 1)
    return tl.where(squares == 0, 1.0, tl.sqrt(squares))


@triton.jit
def unit_length_gradient(x, length, found):
    """The gradient of rows x [64, PK] of these lengths [64] from that of x / length."""
    share = 1.0 / length
    along = tl.sum(x * found, 1) * share * share
    return share[:, None] * (found - along[:, None] * x)


@triton.jit
def store_rows(x, values, first, live, head, HV, columns, K: tl.constexpr, HEADS: tl.constexpr):
    at, here = row_places(first, live, head, HV, columns, K, HEADS)
    tl.store(x + at, values.to(x.dtype.element_ty), here)


@triton.jit(do_not_specialize=["time"])
def unit_keys(
    k, y, key, write_key, rest, gain, sums, chunks, time, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS_K: tl.constexpr, HEADS_Y: tl.constexpr, UNIT_KEYS: tl.constexpr,
    UNIT_WRITES: tl.constexpr,
):  # fmt: skip
    """khat in `key` (None without UNIT_KEYS), alpha in `write_key`, what its rounding leaves in `rest` (or None), 1 in `gain`
    [BT], and in `sums` [M, HV, K] the keys of every chunk, added up. y = A k; without UNIT_WRITES alpha is A khat."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    keys = load_float_rows(k, first, live, head, HV, c, K, HEADS_K)
    if sums is not None:
        tl.store(sums + (m * HV + head).to(tl.int64) * K + c, tl.sum(keys, 0), c < K)
    if UNIT_KEYS:
        key_lengths = row_lengths(keys)
        if head % HEADS_K == 0:
            store_rows(key, keys / key_lengths[:, None], first, live, head, HV, c, K, HEADS_K)
    if head == 0:
        tl.store(gain + first + i, tl.full((64,), 1.0, tl.float32), live)
    if head % HEADS_Y == 0:
        writes = load_float_rows(y, first, live, head, HV, c, K, HEADS_Y)
        if UNIT_WRITES:
            writes /= row_lengths(writes)[:, None]
        elif UNIT_KEYS:
            writes /= key_lengths[:, None]
        store_rows(write_key, writes, first, live, head, HV, c, K, HEADS_Y)
        if rest is not None:
            writes -= writes.to(write_key.dtype.element_ty).to(tl.float32)
            store_rows(rest, writes, first, live, head, HV, c, K, HEADS_Y)


@triton.jit(do_not_specialize=["time"])
def scan_rows(start, sums, states, end, cu_seqlens, time, HV, K: tl.constexpr, PK: tl.constexpr, BACK: tl.constexpr):
    """states [M, HV, K]: `start` [N, HV, K] and the `sums` of the chunks before (BACK: after); `end` [N, HV, K]: and of all."""
    n, head = tl.program_id(0), tl.program_id(1)
    low, count = pieces_of_sequence(cu_seqlens, n, time, 64, 0)
    step, c = tl.arange(0, AHEAD), tl.arange(0, PK)
    at_state = (n * HV + head).to(tl.int64) * K + c
    total = tl.zeros((PK,), tl.float32)
    if start is not None:
        total = tl.load(start + at_state, c < K, 0.0)
    for done in range(0, count + 1, AHEAD):
        now = done + step
        m = (low + count - 1 - now) if BACK else (low + now)
        before = (m + 1) if BACK else (m - 1)
        inside = ((now > 0) & (now <= count))[:, None] & (c < K)[None, :]
        added = tl.load(sums + (before.to(tl.int64) * HV + head)[:, None] * K + c[None, :], inside, 0.0)
        found = total[None, :] + tl.cumsum(added, 0)
        at = (m.to(tl.int64) * HV + head)[:, None] * K + c[None, :]
        tl.store(states + at, found, (now < count)[:, None] & (c < K)[None, :])
        total += tl.sum(added, 0)
    if end is not None:
        tl.store(end + at_state, total, c < K)


@triton.jit
def running_sums(k, z, m, first, live, head, HV, c, K: tl.constexpr, HEADS_K: tl.constexpr):
    """z of the tokens of a chunk, from `z` [M, HV, K] at the chunks' starts; a bad key spoils its token and what follows."""
    i = tl.arange(0, 64)
    keys = load_rows(k, first, live, head, HV, c, K, HEADS_K)
    bad = is_bad(keys)
    ones = tl.where(i[:, None] >= i[None, :], 1.0, 0.0).to(keys.dtype)
    start = tl.load(z + (m * HV + head).to(tl.int64) * K + c, c < K, 0.0)
    found = exact_dot(ones, zero_where(keys, bad), tl.zeros((64, c.shape[0]), tl.float32), "tf32x3") + start[None, :]
    return tl.where(any_so_far(tl.max(bad.to(tl.int32), 1) > 0)[:, None], float("nan"), found)


@triton.jit(do_not_specialize=["time"])
def divisors(q, k, z, divisor, eps, chunks, time, HV, K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr):
    """divisor [BT, HV]."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    z_t = running_sums(k, z, m, first, live, head, HV, c, K, HEADS)
    found = tl.sum(load_float_rows(q, first, live, head, HV, c, K, HEADS) * z_t, 1)
    tl.store(divisor + first * HV + head + i * HV, tl.where(found < eps, eps, found), live)


@triton.jit(do_not_specialize=["time"])
def divisor_gradients(
    q, dq, divisor, ddivisor, sums, eps, chunks, time, HV, K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr
):
    """The gradient of the divisors, and in `sums` what every chunk adds to that of the keys. dq [BT, HV, K] is the gradient of
    the queries from the undivided answers S^T q, which are linear in q: so their product with dO is q.dq."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    queries = load_float_rows(q, first, live, head, HV, c, K, HEADS)
    by = tl.load(divisor + first * HV + head + i * HV, live, 1.0)
    found = -tl.sum(queries * load_float_rows(dq, first, live, head, HV, c, K, 1), 1) / by
    found = tl.where(by == eps, 0.0, found)
    tl.store(ddivisor + first * HV + head + i * HV, found, live)
    tl.store(sums + (m * HV + head).to(tl.int64) * K + c, tl.sum(found[:, None] * queries, 0), c < K)


@triton.jit(do_not_specialize=["time"])
def unit_key_gradients(
    q, k, y, z, later, ddivisor, dq, dkey, dwrite_key, dq_out, dk, dy, chunks, time, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS: tl.constexpr, HEADS_Y: tl.constexpr, UNIT_KEYS: tl.constexpr,
    UNIT_WRITES: tl.constexpr,
):  # fmt: skip
    """dq_out, dk, dy [BT, HV, K] from dq, dkey and dwrite_key, the gradients in the delta rule's inputs. `later` [M, HV, K]: what
    the chunks after give to the gradient of the keys."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    by = tl.load(ddivisor + first * HV + head + i * HV, live, 0.0)
    grad_q = load_float_rows(dq, first, live, head, HV, c, K, 1)
    grad_q += by[:, None] * running_sums(k, z, m, first, live, head, HV, c, K, HEADS)
    store_rows(dq_out, grad_q, first, live, head, HV, c, K, 1)
    queries = load_rows(q, first, live, head, HV, c, K, HEADS)
    still_to_come = tl.where(i[:, None] <= i[None, :], by[None, :], 0.0)
    grad_k = exact_dot(still_to_come, zero_where(queries, is_bad(queries)), tl.zeros((64, PK), tl.float32), "tf32x3")
    grad_k += tl.load(later + (m * HV + head).to(tl.int64) * K + c, c < K, 0.0)[None, :]
    keys = load_float_rows(k, first, live, head, HV, c, K, HEADS)
    found = load_float_rows(dkey, first, live, head, HV, c, K, 1)
    key_lengths = row_lengths(keys)
    if UNIT_KEYS:
        grad_k += unit_length_gradient(keys, key_lengths, found)
    else:
        grad_k += found
    writes = load_float_rows(y, first, live, head, HV, c, K, HEADS_Y)
    found = load_float_rows(dwrite_key, first, live, head, HV, c, K, 1)
    if UNIT_WRITES:
        found = unit_length_gradient(writes, row_lengths(writes), found)
    elif UNIT_KEYS:
        found /= key_lengths[:, None]
        grad_k -= (tl.sum(writes * found, 1) / (key_lengths * key_lengths))[:, None] * keys
    store_rows(dy, found, first, live, head, HV, c, K, 1)
    store_rows(dk, grad_k, first, live, head, HV, c, K, 1)
