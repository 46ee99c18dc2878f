"""The gradients of a sequence's tokens, chunk by chunk from the last: see the derivation in __init__."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import infinite_to_nan, to_float_or_nan
from ..common.packing import pieces_of_sequence, tokens_of_sequence
from ..common.tiles import token_address
from .read import decay, load_kv_beta, next_state, state_places, update_terms


@triton.jit
def load_q_do(q, do, token, head, channel, column, HV, K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr):
    """The query of a token and the gradient of its output, as they lie in memory."""
    query = tl.load(token_address(q, token, head, HV, HEADS_K, K) + channel, channel < K, 0.0)
    return query, tl.load(token_address(do, token, head, HV, 1, V) + column, column < V, 0.0)


@triton.jit(do_not_specialize=["T", "tokens", "items"])
def element_gradients(
    q, k, v, beta, states, do, d_end, scratch, dq, dk, dv, dbeta, d_start, cu_seqlens, T, tokens, items, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
):  # fmt: skip
    """Every program takes one work item after the other: a tile of columns of a sequence and head.

    states [M, HV, K, V]: those at the chunks' starts. scratch [programs, 64, PK, BV]. dq, dk [tiles, tokens, HV, K]: what each
    tile of columns adds; dv, dbeta [tokens, HV, V]. d_end, d_start [N, HV, K, V] or None."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    scratch += tl.program_id(0).to(tl.int64) * (64 * PK * BV)
    in_tile = tl.arange(0, PK)[:, None] * BV + tl.arange(0, BV)[None, :]
    for step in range(0, tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + step * tl.num_programs(0)
        tile, head, n = item % TILES, item // TILES % HV, item // TILES // HV
        channel, column = tl.arange(0, PK), tile * BV + tl.arange(0, BV)
        first, count = tokens_of_sequence(cu_seqlens, n, T)
        chunk, pieces = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
        own, inside = state_places(n.to(tl.int64) * HV + head, channel, column, K, V)
        of_tile = tile.to(tl.int64) * tokens * HV * K
        dq_of, dk_of = dq + of_tile, dk + of_tile
        dS = tl.zeros((PK, BV), tl.float32) if d_end is None else to_float_or_nan(tl.load(d_end + own, inside, 0.0))
        for c in range(pieces - 1, -1, -1):
            begin, size = first + c * 64, tl.minimum(count - c * 64, 64)
            at, held = state_places((chunk + c).to(tl.int64) * HV + head, channel, column, K, V)
            S = tl.load(states + at, held, 0.0)
            ahead = load_kv_beta(k, v, beta, begin, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
            for i in range(0, size):
                token, later = begin + i, begin + tl.minimum(i + 1, size - 1)
                grad_o = (
                    tl.load(token_address(do, token, head, HV, 1, V) + column, column < V, 0.0).to(tl.float32) * scale
                )
                raw = ahead
                ahead = load_kv_beta(k, v, beta, later, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
                tl.store(scratch + i * (PK * BV) + in_tile, S)
                key, length, value, gain, least, e, others = update_terms(raw)
                S = next_state(S, key, value, least, e, others)
                of_query = infinite_to_nan(tl.sum(S * grad_o[None, :], 1))
                tl.store(
                    token_address(dq_of, token, head, HV, 1, K) + channel, of_query.to(dq.dtype.element_ty), channel < K
                )
            tl.debug_barrier()
            ahead_q_do = load_q_do(q, do, begin + size - 1, head, channel, column, HV, K, V, HEADS_K)
            earlier = tl.load(scratch + (size - 1) * (PK * BV) + in_tile)
            for i in range(size - 1, -1, -1):
                token, previous = begin + i, tl.maximum(i - 1, 0)
                raw, q_do, before = ahead, ahead_q_do, earlier
                ahead = load_kv_beta(k, v, beta, begin + previous, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
                ahead_q_do = load_q_do(q, do, begin + previous, head, channel, column, HV, K, V, HEADS_K)
                earlier = tl.load(scratch + previous * (PK * BV) + in_tile)
                query, grad_o = to_float_or_nan(q_do[0]), q_do[1].to(tl.float32) * scale
                key, length, value, gain, least, e, others = update_terms(raw)
                dS += query[:, None] * grad_o[None, :]
                da = dS * before
                of_write, of_least = tl.sum(dS * key[:, None], 0), tl.sum(da, 0)
                of_e = tl.sum(da * others[:, None], 0) + value * of_write
                of_length = tl.sum(e * (of_least - e * of_e - least * of_least), 0)
                of_key = tl.sum(dS * (e * value)[None, :] - (2 * key)[:, None] * (da * e[None, :]), 1)
                of_key = infinite_to_nan(of_key + 2 * key * of_length)
                of_value, of_beta = (
                    infinite_to_nan(e * of_write),
                    infinite_to_nan(least * least * (of_e - length * of_least)),
                )
                tl.store(
                    token_address(dk_of, token, head, HV, 1, K) + channel, of_key.to(dk.dtype.element_ty), channel < K
                )
                tl.store(
                    token_address(dv, token, head, HV, 1, V) + column, of_value.to(dv.dtype.element_ty), column < V
                )
                tl.store(
                    token_address(dbeta, token, head, HV, 1, V) + column, of_beta.to(dbeta.dtype.element_ty), column < V
                )
                dS = decay(least, e, others) * dS
            tl.debug_barrier()
        if d_start is not None:
            tl.store(d_start + own, infinite_to_nan(dS), inside)
