r"""Kernels of softmax attention of one token per sequence, whose keys and values take their place in a ring of S slots.

    rotate_into_ring    q and k turned by their position, k and v written to slot place mod S
    attend_to_slots     a share of the slots: maximum, sum and weighted values, for all query heads of a key head
    combine_shares      o = sum_i exp(m_i - m) acc_i / sum_i exp(m_i - m) l_i, and the counters of tokens

The keys and values are read once, and shares keep all multiprocessors busy where sequences and heads are few. Slot s holds token
number place - (place - s) mod S, which counts if it is not before the first token of its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import padded
from ..common.math import LOG2E
from ..common.overlap import wait_for_inputs
from ..runtime.launch_plan import launch, make_rows_contiguous

SLOTS, WARPS, STAGES = 64, 4, 3  # of a step
ENOUGH_PROGRAMS, MOST_SHARES, SMALLEST_SHARE = 1056, 64, 2  # the smallest share in steps


@triton.jit
def rotate_pairs(x, place, frequency, lane, exists, HALF: tl.constexpr):
    """x [2 HALF] with its pairs of channels (i, i + HALF) turned by place * frequency_i, as two halves."""
    a = tl.load(x + lane, exists, 0.0).to(tl.float32)
    b = tl.load(x + HALF + lane, exists, 0.0).to(tl.float32)
    if frequency is not None:
        angle = place.to(tl.float32) * tl.load(frequency + lane, exists, 0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)
        a, b = a * cos - b * sin, b * cos + a * sin
    return a, b


@triton.jit(do_not_specialize=["slots"])
def rotate_into_ring(
    q, k, v, stride_q, stride_k, stride_v, seen, place, frequency, new_q, keys, values, slots,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has a query head, or a key head with its values. Heads are [2 HALF]."""
    wait_for_inputs(OVERLAP)
    row, head = (tl.program_id(0) // (H + G)).to(tl.int64), tl.program_id(0) % (H + G)
    lane = tl.arange(0, BH)
    exists = lane < HALF
    position = tl.load(seen + row)
    if head < H:
        a, b = rotate_pairs(q + row * stride_q + head * (2 * HALF), position, frequency, lane, exists, HALF)
        to = new_q + (row * H + head) * (2 * HALF) + lane
        tl.store(to, a.to(new_q.dtype.element_ty), exists)
        tl.store(to + HALF, b.to(new_q.dtype.element_ty), exists)
    else:
        head -= H
        slot = tl.load(place + row) % slots
        at = ((row * slots + slot) * G + head) * (2 * HALF) + lane
        a, b = rotate_pairs(k + row * stride_k + head * (2 * HALF), position, frequency, lane, exists, HALF)
        tl.store(keys + at, a.to(keys.dtype.element_ty), exists)
        tl.store(keys + at + HALF, b.to(keys.dtype.element_ty), exists)
        given = v + row * stride_v + head * (2 * HALF) + lane
        tl.store(values + at, tl.load(given, exists, 0.0).to(values.dtype.element_ty), exists)
        tl.store(values + at + HALF, tl.load(given + HALF, exists, 0.0).to(values.dtype.element_ty), exists)


@triton.jit(do_not_specialize=["slots", "share", "shares"])
def attend_to_slots(
    q, keys, values, place, padding, sums, largest, totals, slots, share, shares, scale,
    G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """share: slots of a program, a multiple of BS; scale: of the logits in base 2."""
    wait_for_inputs(OVERLAP)
    part, pair = tl.program_id(0) % shares, (tl.program_id(0) // shares).to(tl.int64)
    row, head = pair // G, pair % G
    now = tl.load(place + row).to(tl.int32)
    newest = now % slots
    first = tl.load(padding + row).to(tl.int32) if padding is not None else 0
    member, channel, lane = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BS)
    query_place = (pair * GROUP + member)[:, None] * K + channel[None, :]
    is_query = (member < GROUP)[:, None] & (channel < K)[None, :]
    query = tl.load(q + query_place, is_query, 0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    answer = tl.zeros((BM, BK), tl.float32)
    begin = part * share
    end = tl.minimum(tl.minimum(begin + share, slots), now + 1)
    base = (row * slots * G + head) * K
    for step in range(begin, end, BS):
        slot = step + lane
        token = now - (newest - slot) - tl.where(slot > newest, slots, 0)
        counts = (slot < end) & (token >= first)
        at = base + slot.to(tl.int64)[:, None] * (G * K) + channel[None, :]
        here = (slot < end)[:, None] & (channel < K)[None, :]
        key = tl.load(keys + at, here, 0.0)
        value = tl.load(values + at, here, 0.0)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        logits = tl.where(counts[None, :], logits, float("-inf"))
        higher = tl.maximum(m, tl.max(logits, 1))
        base_m = tl.where(higher == float("-inf"), 0.0, higher)  # none counts so far
        weight = tl.exp2(logits - base_m[:, None])
        shrink = tl.exp2(m - base_m)
        total = total * shrink + tl.sum(weight, 1)
        answer = tl.dot(weight.to(value.dtype), value, answer * shrink[:, None], input_precision="ieee")
        m = higher
    at = (pair * GROUP + member) * shares + part
    tl.store(largest + at, m, member < GROUP)
    tl.store(totals + at, total, member < GROUP)
    tl.store(sums + at[:, None] * K + channel[None, :], answer, is_query)


@triton.jit(do_not_specialize=["shares", "counted"])
def combine_shares(
    sums, largest, totals, seen, place, o, shares, counted, H: tl.constexpr, K: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    part, channel = tl.arange(0, BI), tl.arange(0, BK)
    m = tl.load(largest + pair * shares + part, part < shares, float("-inf"))
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(weight * tl.load(totals + pair * shares + part, part < shares, 0.0), 0)
    here = (part < shares)[:, None] & (channel < K)[None, :]
    found = tl.load(sums + (pair * shares + part)[:, None] * K + channel[None, :], here, 0.0)
    answer = tl.sum(weight[:, None] * found, 0) / total
    tl.store(o + pair * K + channel, answer.to(o.dtype.element_ty), channel < K)
    row, is_first = pair // H, pair % H == 0
    tl.store(seen + row, tl.load(seen + row) + counted, is_first)
    tl.store(place + row, tl.load(place + row) + counted, is_first)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, place: Tensor, padding: Tensor | None,
    frequency: Tensor | None, count: bool,
) -> Tensor:  # fmt: skip
    """o [N, 1, H, K]; keys and values get one token more, `seen` and `place` as well if `count`. Nothing is checked."""
    batch, _, heads, width = q.shape
    slots, key_heads = keys.shape[1:3]
    group = heads // key_heads
    pairs = batch * key_heads
    steps = -(-slots // SLOTS)
    shares = max(1, min(MOST_SHARES, steps // SMALLEST_SHARE, -(-ENOUGH_PROGRAMS // max(pairs, 1))))
    share = -(-steps // shares) * SLOTS
    shares = -(-slots // share)
    flat = [make_rows_contiguous(x.flatten(2)).squeeze(1) for x in (q, k, v)]
    turned, o = q.new_empty(batch, heads, width), q.new_empty(batch, 1, heads, width)
    partial = [torch.empty(batch * heads, shares, *n, device=q.device, dtype=torch.float32) for n in ((width,), (), ())]
    launch(
        rotate_into_ring, (batch * (heads + key_heads),), *flat, *[x.stride(0) for x in flat], seen, place, frequency,
        turned, keys, values, slots, H=heads, G=key_heads, HALF=width // 2, BH=padded(width // 2, 1), num_warps=1,
    )  # fmt: skip
    launch(
        attend_to_slots, (pairs * shares,), turned, keys, values, place, padding, *partial, slots, share, shares,
        LOG2E.value * width**-0.5, G=key_heads, GROUP=group, K=width, BM=padded(group), BK=padded(width), BS=SLOTS,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    launch(
        combine_shares, (batch * heads,), *partial, seen, place, o, shares, int(count), H=heads, K=width,
        BI=MOST_SHARES, BK=padded(width, 1), num_warps=4,
    )  # fmt: skip
    return o
