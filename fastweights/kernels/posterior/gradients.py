"""Gradients of the posterior's read-out and of what was written, backwards through a segment."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import halve
from ..common.math import clamp_decay, infinite_to_nan, is_bad, prefetch
from ..common.packing import segment_place
from ..common.tiles import token_address
from .tile import (
    address,
    inverse_importance,
    load_inputs,
    load_tile,
    part_channels,
    scale_tile,
    store_tile,
    unpack_token,
)

# The way back undoes writes as far as neither the prior nor an importance at the end of the undone tokens is above so many
# times the prior that is decayed by them: by as much rounding errors grow.
LARGEST, LARGEST_IN_FLOAT32 = tl.constexpr(4096.0), tl.constexpr(8.0)
AHEAD = tl.constexpr(3)  # tokens between a prefetch and the use


@triton.jit
def split_for_tf32(x):
    """x as a sum of two numbers that tf32 represents."""
    upper = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return upper, x - upper


@triton.jit
def put_state(
    scratch_M, scratch_J, M_chunk, J_chunk, chunk, k, v, beta, g, end, column, first_key, HV,
    K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state after `end` tokens of a chunk: that at its start and matrix products of 16 tokens at a time."""
    row = tl.arange(0, 16)
    M, J = (), ()
    for pair in tl.static_range(PARTS // 2):
        c = first_key + 16 * pair + row
        inside = (c < K)[:, None] & (column < V)[None, :]
        at = chunk * (K * V) + c[:, None] * V + column[None, :]
        M = M + (tl.load(M_chunk + at, inside, 0.0).to(tl.float32),)
        J = J + (tl.load(J_chunk + at, inside, 0.0).to(tl.float32),)
    for t in range(0, end, 16):
        i = t + row
        live = i < end
        # Sums of the later tokens' decays: differences of sums from the start would be less precise.
        decays = clamp_decay(tl.load(g + (i + 1) * (HV // HEADS_G), (row < 15) & (i + 1 < end), 0.0))
        kept = tl.exp2(tl.cumsum(decays, 0, reverse=True))[:, None]
        a = tl.exp2(tl.sum(decays, 0) + clamp_decay(tl.load(g + t * (HV // HEADS_G))))
        wanted = live[:, None] & (column < V)[None, :]
        values = tl.load(v + i[:, None] * (HV * V) + column[None, :], wanted, 0.0).to(tl.float32)
        gains = tl.load(beta + i[:, None] * (HV // HEADS_BETA * V) + column[None, :], wanted, 0.0).to(tl.float32)
        value, small_value = split_for_tf32(values * kept)
        gain, small_gain = split_for_tf32(gains * kept)
        new_M, new_J = (), ()
        for pair in tl.static_range(PARTS // 2):
            c = first_key + 16 * pair + row
            keys = tl.load(k + i[None, :] * (HV // HEADS_K * K) + c[:, None], live[None, :] & (c < K)[:, None], 0.0)
            keys = keys.to(tl.float32)
            square, small_square = split_for_tf32(keys * keys)
            m = tl.dot(keys, small_value, a * M[pair], input_precision=PRECISION)
            j = tl.dot(square, small_gain, a * J[pair], input_precision=PRECISION)
            j = tl.dot(small_square, gain, j, input_precision=PRECISION)
            new_M = new_M + (tl.dot(keys, value, m, input_precision=PRECISION),)
            new_J = new_J + (tl.dot(square, gain, j, input_precision=PRECISION),)
        M, J = new_M, new_J
    tl.debug_barrier()
    for pair in tl.static_range(PARTS // 2):
        at = (16 * pair + row[:, None]) * 16 + tl.arange(0, 16)[None, :]
        tl.store(scratch_M + at, infinite_to_nan(M[pair]))
        tl.store(scratch_J + at, infinite_to_nan(J[pair]))
    tl.debug_barrier()


@triton.jit
def load_scratch(scratch, PARTS: tl.constexpr):
    tile = ()
    for part in tl.static_range(PARTS):
        at = part_channels(0, part)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tile = tile + (tl.load(scratch + at),)
    return tile


@triton.jit
def sum_over_columns(x):
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
def largest_importance(M, J, p, PARTS: tl.constexpr):
    """The largest importance or prior, infinity where a number is not finite."""
    largest = tl.maximum(J[0], p)
    for part in tl.static_range(PARTS):
        largest = tl.maximum(largest, tl.where(is_bad(M[part]) | is_bad(J[part]), float("inf"), J[part]))
    return tl.max(largest)


@triton.jit
def find_first_undone(g, end, largest, stride):
    """The earliest token of a chunk from which on the tokens before `end` have decays whose product is at least `largest`."""
    i = tl.arange(0, 64)
    decays = clamp_decay(tl.load(g + i * stride, i < end, 0.0))
    kept = tl.exp2(tl.sum(decays, 0) - tl.cumsum(decays, 0))  # by the later ones
    return end - tl.maximum(tl.sum(((i < end) & (kept >= largest)).to(tl.int32), 0), 1)


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
def differentiate(M, J, dM, debt, token, p, PARTS: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr):
    """One token, from its states M, J and the gradients that come from later tokens: the gradients of its states, what lanes
    have to add up for those of q and k (by parts) [8, 4] and of v and beta [8, 16], W and <dw, variance> [8, 4]. All as decayed
    to one and the same token."""
    key, query, value, gain, grad_o, grad_w = token
    new_dM, new_debt, q_grads, k_grads = (), (), (), ()
    variance_sum = 0.0
    for part in tl.static_range(PARTS):
        k, q = key[part][:, None], query[part][:, None]
        minus_squares = k * (-1.0 * k)
        r = inverse_importance(J[part] + p, PRECISION)
        scaled_o = grad_o[None, :] * r
        D = dM[part] + q * scaled_o
        x = M[part] * scaled_o
        q_grad = sum_over_columns(x)
        z = x * r
        if VARIANCE:
            scaled_w = grad_w[None, :] * r
            y = q * sum_over_columns(scaled_w)
            q_grad += 2 * y
            variance_sum += q * y
            z += q * (scaled_w * r)
        W = q * sum_over_columns(z)
        owed = debt[part] + q * z
        k_grad = sum_over_columns(D * value[None, :]) - (2 * k) * sum_over_columns(owed * gain[None, :])
        if part == 0:
            v_grad, beta_grad, W_sum = D * k, owed * minus_squares, W
        else:
            v_grad += D * k
            beta_grad += owed * minus_squares
            W_sum += W
        new_dM, new_debt, q_grads, k_grads = new_dM + (D,), new_debt + (owed,), q_grads + (q_grad,), k_grads + (k_grad,)
    return new_dM, new_debt, q_grads, k_grads, v_grad, beta_grad, W_sum, variance_sum


@triton.jit
def store_key_gradients(dq, dk, at, q_grads, k_grads, first_key, K: tl.constexpr, PARTS: tl.constexpr):
    """Two parts at a time, so that each of the four lanes of a channel keeps one number: dq or dk of one of the parts."""
    upper_part = tl.arange(0, 2)[None, :, None] > 0
    is_k = tl.arange(0, 2)[None, None, :] > 0
    for pair in tl.static_range(PARTS // 2):
        lower = halve(tl.reshape(q_grads[2 * pair], (8, 2, 2)), tl.reshape(k_grads[2 * pair], (8, 2, 2)), 2, is_k)
        upper = halve(
            tl.reshape(q_grads[2 * pair + 1], (8, 2, 2)), tl.reshape(k_grads[2 * pair + 1], (8, 2, 2)), 2, is_k
        )
        # Turned, as stores take lanes in the order of the first axis where no axis is contiguous.
        total = tl.permute(halve(lower, upper, 1, upper_part), (2, 1, 0))
        is_k_first = tl.arange(0, 2)[:, None, None] > 0
        odd = tl.where(tl.arange(0, 2)[None, :, None] > 0, 1, 0)
        channel = tl.broadcast_to(first_key + 16 * pair + odd + 2 * tl.arange(0, 8)[None, None, :], (2, 2, 8))
        out = tl.where(is_k_first, dk + at, dq + at)
        tl.store(out + channel, total.to(dq.dtype.element_ty), channel < K)


@triton.jit
def store_value_gradients(dv, dbeta, at, v_grad, beta_grad, kept, first_column, V: tl.constexpr):
    """Each of the 32 lanes keeps one number: of v or beta, in one of its four columns."""
    is_beta = tl.arange(0, 2)[None, None, :, None, None] > 0
    odd = tl.arange(0, 2)[None, :, None, None] > 0
    right = tl.arange(0, 2)[:, None, None, None] > 0
    both = halve(tl.reshape(v_grad, (2, 2, 2, 4, 4)), tl.reshape(beta_grad, (2, 2, 2, 4, 4)), 2, is_beta)
    even_columns, odd_columns = tl.split(tl.reshape(both, (2, 2, 2, 4, 2, 2)))
    left_column, right_column = tl.split(halve(even_columns, odd_columns, 1, odd[:, :, :, :, None]))
    total = tl.permute(halve(left_column, right_column, 0, right), (3, 2, 1, 0))
    place = tl.where(tl.arange(0, 2)[None, None, None, :] > 0, 2, 0) + tl.where(
        tl.arange(0, 2)[None, None, :, None] > 0, 1, 0
    )
    column = tl.broadcast_to(first_column + place + 4 * tl.arange(0, 4)[:, None, None, None], (4, 2, 2, 2))
    out = tl.where(tl.arange(0, 2)[None, :, None, None] > 0, dbeta + at, dv + at)
    tl.store(out + column, (kept * total).to(dv.dtype.element_ty), column < V)


@triton.jit
def lanes_to_prefetch(
    pointers, first_key, first_column, HV, K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr
):  # fmt: skip
    """What each lane of a warp fetches ahead: 16 numbers of q or k (four lanes each), v, beta or do. Their addresses at the token
    that the pointers show to, and the bytes per token."""
    q, k, v, beta, g, do = pointers
    SIZE: tl.constexpr = q.dtype.element_ty.primitive_bitwidth // 8
    SIZE_BETA: tl.constexpr = beta.dtype.element_ty.primitive_bitwidth // 8
    which = tl.arange(0, 32) // 4
    channel = tl.minimum(first_key + tl.arange(0, 32) % 4 * 16, K - 1)
    start = tl.where(which == 0, address(q, channel), address(k, channel))
    column = tl.broadcast_to(first_column, (32,))
    start = tl.where(which == 2, address(v, column), tl.where(which == 3, address(beta, column), start))
    stride = tl.where(which < 2, HV // HEADS_K * K * SIZE, HV * V * SIZE)
    stride = tl.where(which == 3, HV // HEADS_BETA * V * SIZE_BETA, stride)
    return tl.where(which > 3, address(do, column), start), stride


@triton.jit(do_not_specialize=["time", "tokens"])
def posterior_gradients(
    q, k, v, beta, g, prior, M_chunk, J_chunk, do, dw, dM_end, dJ_end, scratch_M, scratch_J,
    dq, dk, dv, dbeta, dg, dprior, dM_start, dJ_start, segments, time, tokens, scale, HV,
    K: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr,
    GIVEN_M: tl.constexpr, GIVEN_J: tl.constexpr, ENDED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M_chunk, J_chunk [M, HV, K, V]: states at the chunks' starts."""
    V_TILES: tl.constexpr = (V + 15) // 16
    K_TILES: tl.constexpr = (K + 8 * PARTS - 1) // (8 * PARTS)
    TILES: tl.constexpr = V_TILES * K_TILES
    tile, segment, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES, tl.program_id(1)
    v_tile, k_tile = (tile % V_TILES).to(tl.int64), (tile // V_TILES).to(tl.int64)
    first, stop, first_chunk, sequence, is_first, _ = segment_place(segments, segment, time)
    first_column, first_key = (tile % V_TILES) * 16, (tile // V_TILES) * (8 * PARTS)
    column = first_column + tl.arange(0, 16)
    p = tl.load(prior + head)
    limit = p * (LARGEST if PRECISION == "tf32" else LARGEST_IN_FLOAT32)
    program = (segment.to(tl.int64) * TILES + tile) * HV + head
    scratch_M += program * (PARTS * 128)
    scratch_J += program * (PARTS * 128)
    state = segment.to(tl.int64) * HV + head
    dM = load_tile(dM_end, state, first_key, column, GIVEN_M & (time > 0), K, V, PARTS)
    dJ = load_tile(dJ_end, state, first_key, column, GIVEN_J & (time > 0), K, V, PARTS)
    debt = scale_tile(dJ, -1.0, PARTS)  # -dJ, to which tokens add
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
        q_chunk, k_chunk = token_address(q, begin, head, HV, HEADS_K, K), token_address(k, begin, head, HV, HEADS_K, K)
        beta_chunk = token_address(beta, begin, head, HV, HEADS_BETA, V)
        g_chunk = token_address(g, begin, head, HV, HEADS_G, 1)
        first_row = begin * HV + head
        v_chunk, do_chunk = v + first_row * V, do + first_row * V
        dq_chunk, dk_chunk = dq + first_row * K, dk + first_row * K
        dv_chunk, dbeta_chunk, dg_chunk = dv + first_row * V, dbeta + first_row * V, dg + first_row
        dw_chunk = dw + first_row * V if VARIANCE else None
        pointers = q_chunk, k_chunk, v_chunk, beta_chunk, g_chunk, do_chunk
        if PRECISION == "tf32":  # float32, which the interpreter runs too, does without
            fetched, stride = lanes_to_prefetch(pointers, first_key, first_column, HV, K, V, HEADS_K, HEADS_BETA)
        end = count
        while end > 0:
            put_state(
                scratch_M, scratch_J, M_chunk, J_chunk, chunk, k_chunk, v_chunk, beta_chunk, g_chunk, end, column, first_key,
                HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G, PRECISION,
            )  # fmt: skip
            M, J = load_scratch(scratch_M, PARTS), load_scratch(scratch_J, PARTS)
            # The gradient of the decay that follows; those before come from it by differences.
            later = inner_product(dM, M, PARTS) - inner_product(debt, J, PARTS)
            start = find_first_undone(g_chunk, end, largest_importance(M, J, p, PARTS) / limit, HV // HEADS_G)
            # By later tokens of the block. A product p * kept below would be computed for every element.
            kept, floor = 1.0, p
            ahead = load_inputs(
                pointers, dw_chunk, end - 1, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G
            )
            for i in range(end - 1, start - 1, -1):
                row = i * HV
                if PRECISION == "tf32":  # the loads below are made late in a step, and its end waits for them
                    prefetch(fetched + tl.maximum(i - AHEAD, 0) * stride)
                token = ahead
                earlier = tl.maximum(i - 1, 0)
                ahead = load_inputs(
                    pointers, dw_chunk, earlier, column, first_key, HV, K, PARTS, V, HEADS_K, HEADS_BETA, HEADS_G
                )
                query, key, value, gain, decay, grad_o, grad_w = unpack_token(token, q, K, PARTS)
                value, gain = kept * value, kept * gain
                token = key, query, value, gain, grad_o * scale, grad_w * (scale * scale * kept)
                dM, debt, q_grads, k_grads, v_grad, beta_grad, read, variance_sum = differentiate(
                    M, J, dM, debt, token, floor, PARTS, VARIANCE, PRECISION
                )
                store_key_gradients(dq_chunk, dk_chunk, row * K, q_grads, k_grads, first_key, K, PARTS)
                store_value_gradients(dv_chunk, dbeta_chunk, row * V, v_grad, beta_grad, kept, first_column, V)
                read *= kept
                total += read
                change = p * read - sum_over_columns(value[None, :] * v_grad + gain[None, :] * beta_grad) - variance_sum
                later += tl.sum(tl.sum(change, 1), 0)
                tl.store(dg_chunk + row, later)
                M, J = undo(M, J, key, value, gain, PARTS)
                a = tl.exp2(decay)
                kept, floor = kept * a, floor * a
            dM, debt = scale_tile(dM, kept, PARTS), scale_tile(debt, kept, PARTS)
            end = start
    tl.store(dprior + program, -tl.sum(tl.sum(total, 1), 0))
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if is_first:
            at_start = sequence.to(tl.int64) * HV + head
            store_tile(dM_start, at_start, first_key, column, dM, K, V, PARTS)
            store_tile(dJ_start, at_start, first_key, column, scale_tile(debt, -1.0, PARTS), K, V, PARTS)
