"""The gradients of what the tokens write and read, from the last token of a sequence to the first: see the derivation in
__init__."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
from ..common.packing import pieces_of_sequence, tokens_of_sequence
from .block import (
    AHEAD,
    BLOCK,
    lay_out_channels,
    load_keys,
    load_overlaps,
    load_transposed,
    load_values,
    store_transposed,
    sum_over_channels,
)


@triton.jit
def load_token_back(
    v, gamma, overlaps, answers, kept, du, first_du, t, begin, i: tl.constexpr, stop, head, channel, HV,
    V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of the token whose turn is i in a part of the block from t on: the two parts of du that are known, answer, value, gamma,
    the four numbers that the forward kept, and the products of its key with those after it."""
    place = BLOCK - 1 - begin - i
    t += place
    here = (t < stop) & (place >= 0)
    inside = (channel < V) & here
    at = t * HV + head
    return (
        tl.load(first_du + place * V + channel, inside, 0.0),
        tl.load(du + at * V + channel, inside, 0.0),
        tl.load(answers + at * V + channel, inside, 0.0),
        tl.load(v + at * V + channel, inside, 0.0),
        tl.load(gamma + t * (HV // HEADS_GAMMA) + head // HEADS_GAMMA, here, 0.0),
        tl.load(kept + at * 4, here, 0.0),
        tl.load(kept + at * 4 + 1, here, 0.0),
        tl.load(kept + at * 4 + 2, here, 0.0),
        tl.load(kept + at * 4 + 3, here, 0.0),
        load_overlaps(overlaps, t, here, head, HV, begin, i, PART, True, HEADS_K),
    )


@triton.jit
def differentiate_answer(raw, du):
    """dz, dv and dgamma of a token."""
    z, value, gain = raw[2], raw[3].to(tl.float32), to_float_or_nan(raw[4])
    r, p, cubed, turn = raw[5], raw[6], raw[7], raw[8]
    with_answer, with_value = sum_over_channels(z * du), sum_over_channels(value * du)
    scaled = gain * du
    across = gain * cubed * with_answer
    turned = gain * (turn * with_answer - cubed * with_value)
    return turned * z - across * value - p * scaled, r * scaled - across * z, r * with_value - p * with_answer


@triton.jit(do_not_specialize=["T"])
def pass_gradients(
    q, k, v, gamma, overlaps, do, d_end, answers, kept, du, dz, dv, dgamma, states, d_start, scratch, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du [BT, HV, V]: P^T dO of every chunk of 64 tokens. dz [BT, HV, V] comes out negated. states [M, HV, K, V]: the gradient
    of the state at the end of every chunk. scratch [N, HV, 16, V]."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    m, chunks = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
    channel, copy = lay_out_channels(LANES, COPIES, EACH)
    stored = (channel < V) & (copy == 0)
    at = n.to(tl.int64) * HV + head
    scratch += at * BLOCK * V
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    L = tl.zeros((PV, PK), tl.float32) if d_end is None else load_transposed(d_end + at * K * V, K, PK, V, PV)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    keys = load_keys(k, first + (blocks - 1) * BLOCK, stop, head, HV, K, PK, HEADS_K, BLOCK)
    for step in range(0, blocks):
        block = blocks - 1 - step
        t = first + block * BLOCK
        if (step == 0) | (block % 4 == 3):
            store_transposed(states + ((m + block // 4).to(tl.int64) * HV + head) * K * V, L, K, V)
        D = tl.dot(L.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        tl.store(scratch + i[None, :] * V + j[:, None], D, (j < V)[:, None])
        tl.debug_barrier()
        next_keys = load_keys(k, t - BLOCK, stop, head, HV, K, PK, HEADS_K, BLOCK)
        ahead, later_dz = (), ()
        for turn in tl.static_range(AHEAD):
            ahead += (
                load_token_back(
                    v, gamma, overlaps, answers, kept, du, scratch, t, 0, turn, stop, head, channel, HV, V, HEADS_K,
                    HEADS_GAMMA, PART,
                ),
            )  # fmt: skip
        for _ in tl.static_range(BLOCK - PART):
            later_dz += (tl.zeros((LANES, COPIES, EACH), tl.float32),)
        for begin in range(0, BLOCK, PART):
            for turn in tl.static_range(PART):
                token = ahead[0]
                ahead = ahead[1:] + (
                    load_token_back(
                        v, gamma, overlaps, answers, kept, du, scratch, t, begin, turn + AHEAD, stop, head, channel, HV, V,
                        HEADS_K, HEADS_GAMMA, PART,
                    ),
                )  # fmt: skip
                d_write, row = token[0] + token[1], token[9]
                for later in tl.static_range(BLOCK - PART + turn):
                    d_write += row[later] * later_dz[later]
                d_answer, d_value, d_gain = differentiate_answer(token, d_write)
                later_dz += (d_answer,)
                here = t + (BLOCK - 1 - begin - turn)
                place = here * HV + head
                inside = stored & (here < stop)
                tl.store(dz + place * V + channel, (-d_answer).to(dz.dtype.element_ty), inside)
                tl.store(dv + place * V + channel, d_value.to(dv.dtype.element_ty), inside)
                d_gain = (d_gain + 0 * d_value).to(dgamma.dtype.element_ty)
                tl.store(dgamma + place + 0 * channel, d_gain, inside & (channel == 0))
            later_dz = later_dz[PART:]
        tl.debug_barrier()
        D = load_values(dz, t, stop, head, HV, V, PV, BLOCK)
        L = tl.dot(tl.trans(-D), keys, L, input_precision=PRECISION)
        keys = next_keys
        if block % 4 == 0:
            queries = load_keys(q, t, tl.minimum(t + 64, stop), head, HV, K, PK, HEADS_K, 64)
            grad_o = load_values(do, t, tl.minimum(t + 64, stop), head, HV, V, PV, 64)
            L = tl.dot(tl.trans(grad_o), queries, L, input_precision=PRECISION)
    if d_start is not None:
        store_transposed(d_start + at * K * V, L, K, V)
