"""The forward of Lattice: one program per sequence and head, token after token.

The state stays in registers. What the next token needs is loaded while this one is computed; its answer S^T k is summed together
with the output of this one. What a backward needs of a token is written: see the derivation in __init__.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import to_float_or_nan
from ..common.packing import pieces_of_sequence, tokens_of_sequence
from .layout import (
    hide_layout,
    load_four,
    neighbour_index,
    prefetch_rows,
    single_slots,
    slot_and_channel,
    store_four,
    sum_over_channels,
    sum_over_slots,
    sum_two_over_slots,
)

SHORTEST = tl.constexpr(1e-6)  # a slot that is not zero is at least so long
LEAST_DECAY = tl.constexpr(2.0**-23)
EVERY = tl.constexpr(16)  # tokens from one kept state to the next
TILE = tl.constexpr(32)  # slots taken together where the steps of a chunk are known
LARGEST = tl.constexpr(16.0)  # coefficients beyond it cancel, and little but rounding would be left
FEW = tl.constexpr(4)  # tokens from one state to the next where backward finds them again


@triton.jit
def find_edges(cu_seqlens, n, T):
    """First token of sequence n (int64), the token after its last, and the number of its first kept state."""
    low, _ = pieces_of_sequence(cu_seqlens, n, T, EVERY, 0)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    return first, first + count, low.to(tl.int64)


@triton.jit
def load_state(x, slot, channel, K: tl.constexpr, V: tl.constexpr):
    each = single_slots(slot)
    return load_four(x, each, channel, each < K, V, 5).to(tl.float32)


@triton.jit
def store_state(x, slot, channel, S, K: tl.constexpr, V: tl.constexpr):
    each = single_slots(slot)
    store_four(x, each, channel, S, each < K, V, 5)


@triton.jit
def load_first_slots(start, at, slot, channel, K: tl.constexpr, V: tl.constexpr):
    """Direction and length of the initial slots; rows of the identity where none are given."""
    if start is None:
        each = single_slots(slot)
        S = tl.where((each == channel * 4 + neighbour_index(5)) & (each < K) & (each < V), 1.0, 0.0)
        length = tl.where((each < K) & (each < V), 1.0, 0.0)
    else:
        S = to_float_or_nan(load_state(start + at, slot, channel, K, V))
        square = sum_over_channels(S * S)
        inverse = tl.where(square == 0, 0.0, tl.rsqrt(square))
        S *= inverse
        length = square * inverse
        length = tl.where((length < SHORTEST) & (square > 0), SHORTEST, length)
    return S, length


@triton.jit
def inverse_square(length):
    return tl.where(length == 0, 0.0, 1.0 / (length * length))


@triton.jit
def bound_below(x, least):
    """NaN stays NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def find_turn(key, h, gain, d, b, unit, per_square, OBJECTIVE: tl.constexpr):
    """f and w of a token, and the square of what its slots' lengths are multiplied by. unit: 1 / |s|."""
    a = gain * per_square * (key - b if OBJECTIVE == "encode" else key)
    across = bound_below(sum_over_channels(h * h) - b * b, 0.0)
    longer = d * d + a * a * across
    inverse = tl.rsqrt(longer)
    return (d - a * b) * inverse * unit, a * inverse, longer


@triton.jit
def inverse_length(S):
    """1 / |s|; 0 for slots of zeros."""
    own = sum_over_channels(S * S)
    return tl.where(own == 0, 0.0, tl.rsqrt(own))


@triton.jit
def step_address(t, first, m, HV, head, K: tl.constexpr, BY_CHUNKS: tl.constexpr):
    """Where kept, turned and along begin for the step of token t: [M, HV, K, 16] by chunks, [BT, HV, K] else. m: the number of
    the chunk that begins at token `first`."""
    if BY_CHUNKS:
        number = t - first
        found = ((m + number // EVERY) * HV + head) * K * EVERY + number % EVERY
    else:
        found = (t * HV + head) * K
    return found


@triton.jit
def load_step_slots(x, slot, K: tl.constexpr, BY_CHUNKS: tl.constexpr):
    """A step's numbers of slots, from the place that `step_address` gives."""
    if BY_CHUNKS:
        each = slot * 4 + neighbour_index(3)
        found = tl.load(x + hide_layout(each * EVERY), each < K, 0.0)
    else:
        found = load_four(x, 0, slot, True, K, 3)
    return found


@triton.jit
def store_step_slots(x, slot, values, mask, K: tl.constexpr, BY_CHUNKS: tl.constexpr):
    if BY_CHUNKS:
        each = slot * 4 + neighbour_index(3)
        tl.store(x + hide_layout(each * EVERY), values, mask & (each < K))
    else:
        store_four(x, 0, slot, values, mask, K, 3)


@triton.constexpr_function
def slots_per_program(K):
    """Slots of a program where the steps of a chunk are coefficients."""
    return 16 if K <= 64 else 32


@triton.jit
def has_grown(grown, number, K: tl.constexpr):
    """Whether coefficients of slots came to more than LARGEST in the sequence and head of this number. grown [N, HV, tiles]: the
    square of the largest, of every tile of slots."""
    tiles: tl.constexpr = (K + slots_per_program(K) - 1) // slots_per_program(K)
    most = tl.load(grown + number * tiles)
    for tile in tl.static_range(1, tiles):
        most = tl.maximum(most, tl.load(grown + number * tiles + tile))
    return most > LARGEST * LARGEST


@triton.jit
def load_token(
    q, k, v, gamma, decay, place, here, slot, channel,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Key, query, value, gamma and decay of a token, as they are in memory: what is loaded ahead is converted when it is used."""
    key = load_four(k + place // HEADS_K * K, 0, slot, here, K, 3)
    query = load_four(q + place // HEADS_K * K, 0, slot, here, K, 3)
    value = load_four(v + place * V, 0, channel, here, V, 5)
    gain = tl.load(gamma + place // HEADS_GAMMA, here, 0.0)
    kept = gain if decay is None else tl.load(decay + place // HEADS_DECAY, here, 0.0)
    return key, query, value, gain, kept


@triton.jit
def prefetch_tokens(
    q, k, v, gamma, decay, place, count, HV,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """Fetch `count` tokens of a head ahead, at most 16, from `place` on. q and decay may be None."""
    prefetch_rows(k, place // HEADS_K, count, HV // HEADS_K, K, EVERY)
    if q is not None:
        prefetch_rows(q, place // HEADS_K, count, HV // HEADS_K, K, EVERY)
    prefetch_rows(v, place, count, HV, V, EVERY)
    prefetch_rows(gamma, place // HEADS_GAMMA, count, HV // HEADS_GAMMA, 1, EVERY)
    if decay is not None:
        prefetch_rows(decay, place // HEADS_DECAY, count, HV // HEADS_DECAY, 1, EVERY)


@triton.jit(do_not_specialize=["T"])
def pass_tokens(
    q, k, v, gamma, decay, start, o, kept, turned, along, lengths, answers, states, end, grown, cu_seqlens, T, HV,
    K: tl.constexpr, V: tl.constexpr, OBJECTIVE: tl.constexpr, NORMALIZE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr,
):  # fmt: skip
    """kept, turned, along: see `step_address`. lengths [BT, HV, K]; answers [BT, HV, V]; states [M, HV, K, V]: every 16 tokens.
    grown: see `has_grown`; None where this is the only form."""
    n, head = tl.program_id(0), tl.program_id(1)
    if grown is not None:  # noqa: SIM102 (one is known when compiling)
        if not has_grown(grown, n * HV + head, K):
            return
    BY_CHUNKS: tl.constexpr = grown is not None
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, GV, RV)
    stores_slots, stores_channels = thread % LV == 0, thread // LV == 0
    at = (n.to(tl.int64) * HV + head) * K * V
    S, length = load_first_slots(start, at, slot, channel, K, V)
    alive = length if start is None else tl.where(length == 0, 0.0, 1.0)
    per_square = alive if start is None else inverse_square(length)
    place = first * HV + head
    now = load_token(
        q, k, v, gamma, decay, place, first < stop, slot, channel, K, V, HEADS_K, HEADS_GAMMA, HEADS_DECAY,
    )  # fmt: skip
    if OBJECTIVE == "decode":
        answer = sum_over_slots(S * now[0].to(tl.float32))
    for block in range(first, stop, EVERY):
        store_state(states + (m * HV + head) * K * V, slot, channel, S, K, V)
        # The interpreter runs float32, and does without.
        if q.dtype.element_ty.primitive_bitwidth == 16:
            coming = tl.minimum(stop - block - EVERY, EVERY).to(tl.int32)
            if coming > 0:
                prefetch_tokens(
                    q, k, v, gamma, decay, (block + EVERY) * HV + head, coming, HV, K, V, HEADS_K, HEADS_GAMMA,
                    HEADS_DECAY,
                )  # fmt: skip
        for t in range(block, tl.minimum(block + EVERY, stop)):
            ahead = load_token(
                q, k, v, gamma, decay, place + HV, t + 1 < stop, slot, channel, K, V, HEADS_K, HEADS_GAMMA,
                HEADS_DECAY,
            )  # fmt: skip
            # Infinities that get into the state come out of its sums as NaN; elsewhere they are made NaN.
            key, value = now[0].to(tl.float32), now[2].to(tl.float32)
            query, gain = to_float_or_nan(now[1]), to_float_or_nan(now[3])
            d = 1.0 if decay is None else bound_below(to_float_or_nan(now[4]), LEAST_DECAY)
            h = value
            if OBJECTIVE == "decode":
                h -= answer
                store_four(answers + place * V, 0, channel, h, stores_channels, V, 5)
            b = sum_over_channels(S * h)
            unit = inverse_length(S)  # rounding would change the length more with every token
            b *= unit
            f, w, longer = find_turn(key, h, gain, d, b, unit, per_square, OBJECTIVE)
            S = f * S + w * h
            step = step_address(t, block, m, HV, head, K, BY_CHUNKS)
            store_step_slots(kept + step, slot, f, stores_slots, K, BY_CHUNKS)
            store_step_slots(turned + step, slot, w, stores_slots, K, BY_CHUNKS)
            store_step_slots(along + step, slot, b, stores_slots, K, BY_CHUNKS)
            if NORMALIZE:
                length, per_square, read = alive, alive, query
            else:
                # A product over all tokens: what the hardware's approximate roots are off by would add up.
                length = bound_below(length * tl.sqrt_rn(longer), SHORTEST) * alive
                store_four(lengths + place * K, 0, slot, length, stores_slots, K, 3)
                per_square = inverse_square(length)
                read = query * length
            if OBJECTIVE == "decode":
                out, answer = sum_two_over_slots(S * read, S * ahead[0].to(tl.float32))
            else:
                out = sum_over_slots(S * read)
            store_four(o + place * V, 0, channel, out, stores_channels, V, 5)
            now = ahead
            place += HV
        m += 1
    if end is not None:
        store_state(end + at, slot, channel, S * length, K, V)
