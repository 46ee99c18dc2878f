"""What the tokens of a sequence write, one program per sequence and head: see the derivation in __init__."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.packing import tokens_of_sequence
from .block import (
    AHEAD,
    BLOCK,
    lay_out_channels,
    load_keys,
    load_overlaps,
    load_transposed,
    load_values,
    sum_over_channels,
)

SHORTEST = tl.constexpr(1e-6)  # a shorter answer has no direction


@triton.jit
def find_factors(square, along):
    """r, p, and what is 0 without a direction: r^3 and 3 p r^2."""
    short = square < SHORTEST * SHORTEST
    r = tl.where(short, 1.0, tl.rsqrt(square))
    cubed = tl.where(short, 0.0, r * r * r)
    p = along * cubed
    return r, tl.where(short, 1.0, p), cubed, 3 * p * r * r


@triton.jit
def load_token(
    v, gamma, overlaps, first_answers, t, begin, i: tl.constexpr, stop, head, channel, HV,
    V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What token i of a part of the block from t on takes: its answer by the memory at the block's start, value, gamma,
    and the products of its key with those before it."""
    place = begin + i
    here = (t + place < stop) & (place < BLOCK)
    t += place
    inside = (channel < V) & here
    return (
        tl.load(first_answers + place * V + channel, inside, 0.0),
        tl.load(v + (t * HV + head) * V + channel, inside, 0.0),
        tl.load(gamma + t * (HV // HEADS_GAMMA) + head // HEADS_GAMMA, here, 0.0),
        load_overlaps(overlaps, t, here, head, HV, begin, i, PART, False, HEADS_K),
    )


@triton.jit(do_not_specialize=["T"])
def write_tokens(
    k, v, gamma, overlaps, start, answers, kept, u, scratch, cu_seqlens, T, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """answers [BT, HV, V]: z; kept [BT, HV, 4]: what `find_factors` finds; u [BT, HV, V]. scratch [N, HV, 16, V]."""
    n, head = tl.program_id(0), tl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    channel, copy = lay_out_channels(LANES, COPIES, EACH)
    at = n.to(tl.int64) * HV + head
    scratch += at * BLOCK * V
    i, j = tl.arange(0, BLOCK), tl.arange(0, PV)
    S = tl.zeros((PV, PK), tl.float32) if start is None else load_transposed(start + at * K * V, K, PK, V, PV)
    keys = load_keys(k, first, stop, head, HV, K, PK, HEADS_K, BLOCK)
    blocks = ((stop - first + BLOCK - 1) // BLOCK).to(tl.int32)
    for block in range(0, blocks):
        t = first + block * BLOCK
        Z = tl.dot(S.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        tl.store(scratch + i[None, :] * V + j[:, None], Z, (j < V)[:, None])
        tl.debug_barrier()
        next_keys = load_keys(k, t + BLOCK, stop, head, HV, K, PK, HEADS_K, BLOCK)
        ahead, before = (), ()
        for now in tl.static_range(AHEAD):
            ahead += (
                load_token(
                    v, gamma, overlaps, scratch, t, 0, now, stop, head, channel, HV, V, HEADS_K, HEADS_GAMMA, PART
                ),
            )
        for _ in tl.static_range(BLOCK - PART):
            before += (tl.zeros((LANES, COPIES, EACH), tl.float32),)
        for begin in range(0, BLOCK, PART):
            for now in tl.static_range(PART):
                z, value, gain, row = ahead[0]
                ahead = ahead[1:] + (
                    load_token(
                        v, gamma, overlaps, scratch, t, begin, now + AHEAD, stop, head, channel, HV, V, HEADS_K, HEADS_GAMMA, PART
                    ),
                )  # fmt: skip
                value = value.to(tl.float32)
                for earlier in tl.static_range(BLOCK - PART + now):
                    z += row[earlier] * before[earlier]
                square, along = sum_over_channels(z * z), sum_over_channels(z * value)
                r, p, cubed, turn = find_factors(square, along)
                write = gain.to(tl.float32) * (r * value - p * z)
                before += (write,)
                place = (t + begin + now) * HV + head
                here = (copy == 0) & (t + begin + now < stop)
                tl.store(answers + place * V + channel, z, here & (channel < V))
                tl.store(u + place * V + channel, write.to(u.dtype.element_ty), here & (channel < V))
                numbers = tl.where(channel < 2, tl.where(channel == 0, r, p), tl.where(channel == 2, cubed, turn))
                tl.store(kept + place * 4 + channel, numbers, here & (channel < 4))
            before = before[PART:]
        tl.debug_barrier()
        U = load_values(u, t, stop, head, HV, V, PV, BLOCK)
        S = tl.dot(tl.trans(U), keys, S, input_precision=PRECISION)
        keys = next_keys
