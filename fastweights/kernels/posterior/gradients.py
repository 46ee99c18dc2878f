"""Gradients of the posterior's read-out and of what was written, backwards through a segment."""

from __future__ import annotations

import triton
import triton.language as tl

from ..math import clamped, is_bad
from ..packing import segment_place
from .lanes import halve
from .tile import at_token, load_rows, load_tile, load_token, spread, store_tile, times, write

# The way back undoes the writes of a block where no importance at its end is above the limit times the decayed prior: the prior
# times the decays from the block's first token to its end. The limit of a chunk is lower, because the state at a chunk's end
# has the precision of a matrix product.
LARGEST_OF_CHUNK, LARGEST_OF_BLOCK, LARGEST_IN_FLOAT32 = tl.constexpr(8.0), tl.constexpr(4096.0), tl.constexpr(8.0)


@triton.jit
def place_in_scratch(slot, part: tl.constexpr, PARTS: tl.constexpr):
    return (slot * PARTS + part) * 128 + tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def put(scratch, slot, tile, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        tl.store(scratch + place_in_scratch(slot, part, PARTS), tile[part])


@triton.jit
def get(scratch, slot, PARTS: tl.constexpr):
    tile = ()
    for part in tl.static_range(PARTS):
        tile = tile + (tl.load(scratch + place_in_scratch(slot, part, PARTS)),)
    return tile


@triton.jit
def load_start(
    x_start, x_chunk, state, before, is_first, first_key, column,
    STARTED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The state at a chunk's start: that at the end of the chunk `before`, or a segment's own where the chunk is its first."""
    tile = load_tile(x_chunk, before, first_key, column, ~is_first, K, V, PARTS)
    if STARTED:
        own = load_tile(x_start, state, first_key, column, is_first, K, V, PARTS)
        tile = sum_of(tile, own, PARTS)
    return tile


@triton.jit
def sum_of(A, B, PARTS: tl.constexpr):
    out = ()
    for part in tl.static_range(PARTS):
        out = out + (A[part] + B[part],)
    return out


@triton.jit
def across(x):
    """Sums over the four columns of a thread: [8, 4] from [8, 16]."""
    return tl.sum(tl.reshape(x, (8, 4, 4)), 2)


@triton.jit
def inner_product(A, B, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        if part == 0:
            x = A[part] * B[part]
        else:
            x += A[part] * B[part]
    return tl.sum(x)


@triton.jit
def step(M, J, key, value, gain, a, PARTS: tl.constexpr):
    """The memory after a token, its decay included."""
    M, J = times(M, a, PARTS), times(J, a, PARTS)
    return write(M, J, key, value, gain, PARTS)


@triton.jit
def can_undo(M, J, kept, limit, PARTS: tl.constexpr):
    """Whether no importance is above `limit` decayed priors, and all numbers are finite."""
    largest = J[0]
    for part in tl.static_range(PARTS):
        largest = tl.maximum(largest, tl.where(is_bad(M[part]) | is_bad(J[part]), float("inf"), J[part]))
    return tl.max(largest) <= limit * kept


@triton.jit
def kept_after(g, count, stride):
    """By how much `count` tokens from the one that g shows to decay the state of that one."""
    i = tl.arange(0, 64)
    decays = tl.load(g + i * stride, (i > 0) & (i < count), 0.0)
    return tl.exp2(tl.sum(clamped(decays)))


@triton.jit
def undo(M, J, key, value, gain, PARTS: tl.constexpr):
    """The memory before a write."""
    new_M, new_J = (), ()
    for part in tl.static_range(PARTS):
        k = key[part]
        new_M = new_M + (M[part] - k[:, None] * value[None, :],)
        new_J = new_J + (J[part] - (k * k)[:, None] * gain[None, :],)
    return new_M, new_J


@triton.jit
def differentiate(
    M, J, dM, debt, key, query, value, gain, grad_o, grad_w, p,
    PARTS: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One token, from its states M, J and the gradients that come from later tokens: the gradients of its states, what lanes
    have to add up for those of q and k (by parts) [8, 4] and of v and beta [8, 16], W and <dw, variance> [8, 4]. All as decayed
    to one and the same token."""
    new_dM, new_debt, of_q, of_k = (), (), (), ()
    of_variance = 0.0
    for part in tl.static_range(PARTS):
        k, q = key[part][:, None], query[part][:, None]
        minus_squares = k * (-1.0 * k)
        r = spread(J[part] + p, PRECISION)
        x = M[part] * r
        by_q = q * (grad_o[None, :] * r)
        D = dM[part] + by_q
        to_q = across(x * grad_o[None, :])
        if VARIANCE:
            by_w = grad_w[None, :] * r
            y = q * across(by_w)
            to_q += 2 * y
            of_variance += q * y
            W = by_q * x + (q * q) * by_w * r
            owed = debt[part] + W
        else:
            W = by_q * x
            owed = tl.fma(by_q, x, debt[part])  # would else be a product for both, and two sums
        to_k = across(D * value[None, :]) - (2 * k) * across(owed * gain[None, :])
        if part == 0:
            to_v, to_beta, all_W = D * k, owed * minus_squares, W
        else:
            to_v += D * k
            to_beta += owed * minus_squares
            all_W += W
        new_dM, new_debt, of_q, of_k = new_dM + (D,), new_debt + (owed,), of_q + (to_q,), of_k + (to_k,)
    return new_dM, new_debt, of_q, of_k, to_v, to_beta, across(all_W), of_variance


@triton.jit
def store_key_gradients(dq, dk, at, of_q, of_k, first_key, K: tl.constexpr, PARTS: tl.constexpr):
    """Two parts at a time, so that each of the four lanes of a channel keeps one number: dq or dk of one of the parts."""
    upper_part = tl.arange(0, 2)[None, :, None] > 0
    is_k = tl.arange(0, 2)[None, None, :] > 0
    for pair in tl.static_range(PARTS // 2):
        lower = halve(tl.reshape(of_q[2 * pair], (8, 2, 2)), tl.reshape(of_k[2 * pair], (8, 2, 2)), 2, is_k)
        upper = halve(tl.reshape(of_q[2 * pair + 1], (8, 2, 2)), tl.reshape(of_k[2 * pair + 1], (8, 2, 2)), 2, is_k)
        total = halve(lower, upper, 1, upper_part)
        channel = first_key + 16 * pair + tl.arange(0, 2)[None, :, None] + 2 * tl.arange(0, 8)[:, None, None]
        channel = tl.broadcast_to(channel, (8, 2, 2))
        out = tl.where(is_k, dk + at, dq + at)
        tl.store(out + channel, total.to(dq.dtype.element_ty), channel < K)


@triton.jit
def store_value_gradients(dv, dbeta, at, to_v, to_beta, kept, first_column, V: tl.constexpr):
    """Each of the 32 lanes keeps one number: of v or beta, in one of its four columns."""
    is_beta = tl.arange(0, 2)[None, None, :, None, None] > 0
    odd = tl.arange(0, 2)[None, :, None, None] > 0
    right = tl.arange(0, 2)[:, None, None, None] > 0
    both = halve(tl.reshape(to_v, (2, 2, 2, 4, 4)), tl.reshape(to_beta, (2, 2, 2, 4, 4)), 2, is_beta)
    even_columns, odd_columns = tl.split(tl.reshape(both, (2, 2, 2, 4, 2, 2)))
    left_column, right_column = tl.split(halve(even_columns, odd_columns, 1, odd[:, :, :, :, None]))
    total = halve(left_column, right_column, 0, right)
    place = 2 * tl.arange(0, 2)[:, None, None, None] + tl.arange(0, 2)[None, :, None, None]
    column = first_column + place + 4 * tl.arange(0, 4)[None, None, None, :]
    column = tl.broadcast_to(column, (2, 2, 2, 4))
    out = tl.where(tl.arange(0, 2)[None, None, :, None] > 0, dbeta + at, dv + at)
    tl.store(out + column, (kept * total).to(dv.dtype.element_ty), column < V)


@triton.jit(do_not_specialize=["time", "tokens"])
def posterior_gradients(
    q, k, v, beta, g, prior, M_start, J_start, M_chunk, J_chunk, do, dw, dM_end, dJ_end, scratch_M, scratch_J,
    dq, dk, dv, dbeta, dg, dprior, dM_start, dJ_start, segments, time, tokens, scale, HV,
    K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, STARTED: tl.constexpr,
    GIVEN_M: tl.constexpr, GIVEN_J: tl.constexpr, ENDED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M_chunk, J_chunk [M, HV, K, V]: states at the chunks' ends."""
    V_TILES: tl.constexpr = (V + 15) // 16
    K_TILES: tl.constexpr = (K + 8 * PARTS - 1) // (8 * PARTS)
    SLOTS: tl.constexpr = 64 // BLOCK
    tile, segment, head = (
        tl.program_id(0) % (V_TILES * K_TILES),
        tl.program_id(0) // (V_TILES * K_TILES),
        tl.program_id(1),
    )
    v_tile, k_tile = (tile % V_TILES).to(tl.int64), (tile // V_TILES).to(tl.int64)
    first, stop, first_chunk, sequence, is_first, _ = segment_place(segments, segment, time)
    column = (tile % V_TILES) * 16 + tl.arange(0, 16)
    first_key = (tile // V_TILES) * (8 * PARTS)
    p = tl.load(prior + head)
    chunk_limit = p * (LARGEST_OF_CHUNK if PRECISION == "tf32" else LARGEST_IN_FLOAT32)
    block_limit = p * (LARGEST_OF_BLOCK if PRECISION == "tf32" else LARGEST_IN_FLOAT32)
    program = (segment.to(tl.int64) * (V_TILES * K_TILES) + tile) * HV + head
    scratch_M += program * (SLOTS * PARTS * 128)
    scratch_J += program * (SLOTS * PARTS * 128)
    state = segment.to(tl.int64) * HV + head
    dM = load_tile(dM_end, state, first_key, column, GIVEN_M & (time > 0), K, V, PARTS)
    dJ = load_tile(dJ_end, state, first_key, column, GIVEN_J & (time > 0), K, V, PARTS)
    debt = times(dJ, -1.0, PARTS)  # -dJ, to which tokens add
    total = tl.zeros((8, 4), tl.float32)
    dq += v_tile * tokens * HV * K
    dk += v_tile * tokens * HV * K
    dv += k_tile * tokens * HV * V
    dbeta += k_tile * tokens * HV * V
    dg += tile.to(tl.int64) * tokens * HV
    for c in range((stop - first + 63) // 64 - 1, -1, -1):
        begin = first + c * 64
        chunk = (first_chunk + c) * HV + head
        count = tl.minimum(stop - begin, 64).to(tl.int32)
        q_chunk, k_chunk = at_token(q, begin, head, HV, HEADS_K, K), at_token(k, begin, head, HV, HEADS_K, K)
        beta_chunk, g_chunk = at_token(beta, begin, head, HV, HEADS_BETA, V), at_token(g, begin, head, HV, HEADS_G, 1)
        first_row = begin * HV + head
        v_chunk, do_chunk = v + first_row * V, do + first_row * V
        dq_chunk, dk_chunk = dq + first_row * K, dk + first_row * K
        dv_chunk, dbeta_chunk, dg_chunk = dv + first_row * V, dbeta + first_row * V, dg + first_row
        if VARIANCE:
            dw_chunk = dw + first_row * V
        M = load_tile(M_chunk, chunk, first_key, column, time > 0, K, V, PARTS)
        J = load_tile(J_chunk, chunk, first_key, column, time > 0, K, V, PARTS)
        kept = kept_after(g_chunk, count, HV // HEADS_G)
        size = 64
        if ~can_undo(M, J, kept, chunk_limit, PARTS):
            size = BLOCK
            M = load_start(M_start, M_chunk, state, chunk - HV, c == 0, first_key, column, STARTED, K, V, PARTS)
            J = load_start(J_start, J_chunk, state, chunk - HV, c == 0, first_key, column, STARTED, K, V, PARTS)
            for i in range(0, count):
                if i % BLOCK == 0:
                    put(scratch_M, i // BLOCK, M, PARTS)
                    put(scratch_J, i // BLOCK, J, PARTS)
                key, value, gain, decay = load_token(
                    k_chunk, v_chunk, beta_chunk, g_chunk, i, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA,
                    HEADS_G,
                )  # fmt: skip
                M, J = step(M, J, key, value, gain, tl.exp2(decay), PARTS)
            tl.debug_barrier()
        # The gradient of the decay that follows the chunk; those inside come from it by differences.
        later = inner_product(dM, M, PARTS) - inner_product(debt, J, PARTS)
        blocks = (count + size - 1) // size
        for back in range(0, blocks):
            start = (blocks - 1 - back) * size
            end = tl.minimum(start + size, count)
            steep = False
            if size == BLOCK:
                if back > 0:
                    M = get(scratch_M, blocks - back, PARTS)
                    J = get(scratch_J, blocks - back, PARTS)
                kept = kept_after(g_chunk + start * (HV // HEADS_G), end - start, HV // HEADS_G)
                steep = ~can_undo(M, J, kept, block_limit, PARTS)
            kept = 1.0  # by later tokens of the block
            for i in range(end - 1, start - 1, -1):
                if steep:
                    M = get(scratch_M, start // BLOCK, PARTS)
                    J = get(scratch_J, start // BLOCK, PARTS)
                    for j in range(start, i + 1):
                        key, value, gain, decay = load_token(
                            k_chunk, v_chunk, beta_chunk, g_chunk, j, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA,
                            HEADS_G,
                        )  # fmt: skip
                        M, J = step(M, J, key, value, gain, tl.exp2(decay), PARTS)
                row = i * HV
                key, value, gain, decay = load_token(
                    k_chunk, v_chunk, beta_chunk, g_chunk, i, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA,
                    HEADS_G,
                )  # fmt: skip
                live = column < V
                query = load_rows(q_chunk, i * (HV // HEADS_K * K), first_key, K, PARTS)
                grad_o = tl.load(do_chunk + row * V + column, live, 0.0).to(tl.float32) * scale
                grad_w = grad_o
                if VARIANCE:
                    grad_w = tl.load(dw_chunk + row * V + column, live, 0.0).to(tl.float32) * (scale * scale * kept)
                a = tl.exp2(decay)
                value, gain = kept * value, kept * gain
                dM, debt, of_q, of_k, to_v, to_beta, read, of_variance = differentiate(
                    M, J, dM, debt, key, query, value, gain, grad_o, grad_w, p * kept, PARTS, VARIANCE, PRECISION
                )
                store_key_gradients(dq_chunk, dk_chunk, row * K, of_q, of_k, first_key, K, PARTS)
                store_value_gradients(dv_chunk, dbeta_chunk, row * V, to_v, to_beta, kept, (tile % V_TILES) * 16, V)
                read *= kept
                total += read
                change = p * read - across(value[None, :] * to_v + gain[None, :] * to_beta) - of_variance
                later += tl.sum(tl.sum(change, 1), 0)
                tl.store(dg_chunk + row, later)
                if steep:
                    dM, debt = times(dM, a, PARTS), times(debt, a, PARTS)
                else:
                    M, J = undo(M, J, key, value, gain, PARTS)
                    kept *= a
            dM, debt = times(dM, kept, PARTS), times(debt, kept, PARTS)
    tl.store(dprior + program, -tl.sum(tl.sum(total, 1), 0))
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if is_first:
            at_start = sequence.to(tl.int64) * HV + head
            store_tile(dM_start, at_start, first_key, column, dM, K, V, PARTS)
            store_tile(dJ_start, at_start, first_key, column, times(debt, -1.0, PARTS), K, V, PARTS)


@triton.jit(do_not_specialize=["count", "tiles"])
def sum_tiles(x, out, count, tiles, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """out [count] from x [tiles, count]: what the tiles of a head left of a gradient. AT_ONCE tiles are loaded together."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tiles, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            total += tl.load(x + at, (at < count) & (first + i < tiles), 0.0).to(tl.float32)
            x += count
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)
