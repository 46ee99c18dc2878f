"""Kernels that join what several programs left: the states that segments start from, and gradients from partial sums."""

from __future__ import annotations

import triton
import triton.language as tl

from .packing import pieces_of_sequence


@triton.jit(do_not_specialize=["time", "length"])
def combine_segments(
    begin, added, starts, end, transition, cu_seqlens, time, length, HV,
    K: tl.constexpr, PK: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, BACK: tl.constexpr, BEGUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- T S + R from segment to segment of a sequence (BACK: T^T, from the last). added: R per segment; None for zeros, with
    the identity as the first S. starts, which may be `added`: the S that each segment begins with. end: S after the last segment
    of each sequence, or None. Without DELTA T is a log decay (base 2) per channel, [P, HV, K]."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    part, sequence, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    low, count = pieces_of_sequence(cu_seqlens, sequence, time, length, 1)
    c = tl.arange(0, PK)
    column = part * BV + tl.arange(0, BV)
    inside = (c < K)[:, None] & (column < V)[None, :]
    at = (sequence.to(tl.int64) * HV + head) * K
    if added is None:
        S = tl.where(c[:, None] == column[None, :], 1.0, 0.0)
    elif BEGUN:
        S = tl.load(begin + (at + c)[:, None] * V + column[None, :], inside, 0.0).to(tl.float32)
    else:
        S = tl.zeros((PK, BV), tl.float32)
    for step in range(0, count):
        segment = (low + count - 1 - step) if BACK else (low + step)
        base = (segment.to(tl.int64) * HV + head) * K
        at_segment = base * V + c[:, None] * V + column[None, :]
        if added is None:  # noqa: SIM108 (one is known when compiling)
            R = tl.zeros((PK, BV), tl.float32)
        else:
            R = tl.load(added + at_segment, inside, 0.0)
        tl.store(starts + at_segment, S, inside)
        if DELTA:
            tl.debug_barrier()  # S is read back by parts, from other threads
            S = R
            for k0 in tl.static_range(0, K, BK):
                d = k0 + tl.arange(0, BK)
                part_of_S = tl.load(
                    starts + base * V + d[:, None] * V + column[None, :], (d < K)[:, None] & (column < V)[None, :], 0.0
                )
                if BACK:
                    at_T = base * K + d[:, None] * K + c[None, :]
                    T = tl.trans(tl.load(transition + at_T, (d < K)[:, None] & (c < K)[None, :], 0.0))
                else:
                    at_T = base * K + c[:, None] * K + d[None, :]
                    T = tl.load(transition + at_T, (c < K)[:, None] & (d < K)[None, :], 0.0)
                S = tl.dot(T, part_of_S.to(T.dtype), S, input_precision=PRECISION)
            tl.debug_barrier()
        else:
            S = R + tl.exp2(tl.load(transition + base + c, c < K, 0.0))[:, None] * S
    if end is not None:
        tl.store(end + (at + c)[:, None] * V + column[None, :], S, inside)


@triton.jit
def sum_parts(parts, out, stride, count, PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(PARTS):
        for head in range(HEADS):
            total += tl.load(parts + at * HEADS + head, at < count, 0.0)
        parts += stride
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)


@triton.jit(do_not_specialize=["stride", "beta_count", "g_count", "M"])
def reduce_gate_grads(
    gate_grads, center_grads, dbeta, dg, dcenter, chunks, stride, beta_count, g_count, M, center_count,
    PARTS: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_G: tl.constexpr, BETA: tl.constexpr, G: tl.constexpr,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gate_grads [PARTS, 2, BT, HV], `stride` from part to part: dbeta and dg, of beta_count and g_count numbers. center_grads
    [M, center_count]: dcenter, one program per number, after the others. BETA, G, CENTER: which of these are wanted."""
    if BETA:
        sum_parts(gate_grads, dbeta, stride, beta_count, PARTS, HEADS_BETA, BLOCK)
    if G:
        sum_parts(gate_grads + stride // 2, dg, stride, g_count, PARTS, HEADS_G, BLOCK)
    if CENTER:
        place = tl.program_id(0) - (tl.num_programs(0) - center_count)
        if place >= 0:
            total = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, M, BLOCK):
                m = first + tl.arange(0, BLOCK)
                used = m < M
                if chunks is not None:  # numbers that no chunk has were not written
                    used = tl.load(chunks + 2 * m + 1, used, 0) > 0
                total += tl.load(center_grads + m.to(tl.int64) * center_count + place, used, 0.0)
            tl.store(dcenter + place, tl.sum(total, 0).to(dcenter.dtype.element_ty))


@triton.jit(do_not_specialize=["units", "tiles"])
def sum_tiles(x, out, units, tiles, UNIT: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """out [count] from x [tiles, count]: what the tiles of a head left of a gradient. AT_ONCE tiles are loaded together.
    count = units * UNIT: where it is known as a multiple of 8, 8 numbers are one load."""
    count = units.to(tl.int64) * UNIT
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tiles, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            total += tl.load(x + at, (at < count) & (first + i < tiles), 0.0).to(tl.float32)
            x += count
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)


@triton.jit(do_not_specialize=["units"])
def sum_heads(
    x, out, units, UNIT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [.., heads, WIDTH] from x [.., heads * GROUP, WIDTH], in float32. units * UNIT numbers: 8 that follow each other are
    one load."""
    count = units.to(tl.int64) * UNIT
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = at // WIDTH
    first = head * (GROUP * WIDTH) + (at - head * WIDTH)
    total = tl.zeros((BLOCK,), tl.float32)
    for member in tl.static_range(GROUP):
        total += tl.load(x + first + member * WIDTH, at < count, 0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)
