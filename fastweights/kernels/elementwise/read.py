"""The tokens of a sequence from first to last: what the memory answers, and its states."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import infinite_to_nan, to_float_or_nan
from ..common.packing import pieces_of_sequence, tokens_of_sequence
from ..common.tiles import token_address


@triton.jit
def load_kv_beta(
    k, v, beta, token, head, channel, column, HV,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
):  # fmt: skip
    """The key, value and gain of a token, as they lie in memory: loops load them a step before `update_terms` takes them."""
    return (
        tl.load(token_address(k, token, head, HV, HEADS_K, K) + channel, channel < K, 0.0),
        tl.load(token_address(v, token, head, HV, 1, V) + column, column < V, 0.0),
        tl.load(token_address(beta, token, head, HV, HEADS_BETA, V) + column, column < V, 0.0),
    )


@triton.jit
def update_terms(raw):
    """The key and L, the value, beta, least, e and others of a token: see the derivation."""
    key, value, beta = to_float_or_nan(raw[0]), to_float_or_nan(raw[1]), to_float_or_nan(raw[2])
    squares = key * key
    length = tl.sum(squares, 0)
    least = 1 / (1 + beta * length)
    return key, length, value, beta, least, beta * least, tl.maximum(length - squares, 0.0, tl.PropagateNan.ALL)


@triton.jit
def decay(least, e, others):
    """The decay of every element, [PK, BV]."""
    return least[None, :] + others[:, None] * e[None, :]


@triton.jit
def next_state(S, key, value, least, e, others):
    """The state after a token."""
    return decay(least, e, others) * S + key[:, None] * (e * value)[None, :]


@triton.jit
def state_places(state, channel, column, K: tl.constexpr, V: tl.constexpr):
    """Where a tile lies in the state of this number (int64) in a tensor [.., K, V], and which of its numbers there are."""
    return state * (K * V) + channel[:, None] * V + column[None, :], (channel < K)[:, None] & (column < V)[None, :]


@triton.jit(do_not_specialize=["T"])
def read_elements(
    q, k, v, beta, start, o, end, states, cu_seqlens, T, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
):  # fmt: skip
    """start, end [N, HV, K, V]; states [M, HV, K, V]: those at the chunks' starts. start may be None, and those of o, end and
    states that are not wanted."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    n, head = tl.program_id(0) // TILES, tl.program_id(1)
    channel, column = tl.arange(0, PK), tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    chunk, pieces = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
    own, inside = state_places(n.to(tl.int64) * HV + head, channel, column, K, V)
    S = tl.zeros((PK, BV), tl.float32) if start is None else to_float_or_nan(tl.load(start + own, inside, 0.0))
    if count > 0:
        ahead = load_kv_beta(k, v, beta, first, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
        for i in range(0, count):
            token = first + i
            if states is not None:  # noqa: SIM102 (one is known when compiling)
                if i % 64 == 0:
                    at, held = state_places((chunk + i // 64).to(tl.int64) * HV + head, channel, column, K, V)
                    tl.store(states + at, S, held)
            if o is not None:  # before the state is computed, so that the load does not come late
                raw_query = tl.load(token_address(q, token, head, HV, HEADS_K, K) + channel, channel < K, 0.0)
            raw, later = ahead, first + tl.minimum(i + 1, count - 1)
            ahead = load_kv_beta(k, v, beta, later, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
            key, length, value, gain, least, e, others = update_terms(raw)
            S = next_state(S, key, value, least, e, others)
            if o is not None:
                query = to_float_or_nan(raw_query)
                answer = tl.sum(S * (query * scale)[:, None], 0)
                to = token_address(o, token, head, HV, 1, V) + column
                tl.store(to, infinite_to_nan(answer).to(o.dtype.element_ty), column < V)
    if end is not None:
        tl.store(end + own, infinite_to_nan(S), inside)
