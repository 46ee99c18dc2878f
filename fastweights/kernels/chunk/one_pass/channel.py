"""One decay per key channel, in Gluon for Hopper GPUs: the operands that the passes take of a chunk, and their products.

By two forms, as `common.delta_rule.channel_decay`: flat, where no channel loses much in the chunk, one product of k exp(G) and
w exp(-G) has all pairs; else they meet by halves. Threads have four channels of eight tokens, 64 channels at a time.
"""

from __future__ import annotations

from ...common.math import clamp_decay
from ...common.packing import program_chunk, program_part
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .passes import copy_rows, product_layout, row_places, store_square, unknown_zero
from .write_keys import add, approximate

APART = gl.constexpr(gl.BlockedLayout([1, 8, 4], [2, 1, 16], [4, 1, 1], [2, 1, 0]))  # [8, 8, 64]
TILE = gl.constexpr(gl.BlockedLayout([8, 4], [2, 16], [4, 1], [1, 0]))  # the same as [64, 64]
EDGES = gl.constexpr(gl.SliceLayout(1, APART))  # [8, 64]


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def pick_row(x, row: gl.constexpr):
    """x[:, row] of numbers [4, rows, channels] whose rows lie within a thread: no instruction."""
    i = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
    bits = gl.where(i[None, :, None] == row, x.to(gl.int32, bitcast=True), 0)
    return gl.reduce(bits, 1, either).to(gl.float32, bitcast=True)


@gluon.jit
def tile_places(STRIDE: gl.constexpr):
    """The rows of a tile [64, 64], and the places of all numbers. A thread's rows differ by constants."""
    IN_ROWS: gl.constexpr = gl.SliceLayout(2, APART)
    b = gl.arange(0, 8, gl.SliceLayout(1, IN_ROWS)) * 8 + unknown_zero()
    r = gl.arange(0, 8, gl.SliceLayout(0, IN_ROWS))
    c = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, APART)))
    row = b[:, None] + r[None, :]
    at = (b.to(gl.int64)[:, None] * STRIDE + r.to(gl.int64)[None, :] * STRIDE)[:, :, None] + c[None, None, :]
    row = gl.convert_layout(row.reshape([64]), gl.SliceLayout(1, TILE))
    at = gl.convert_layout(at.reshape([64, 64]), TILE)
    return row, gl.max_contiguous(gl.multiple_of(at, [4, 4]), [1, 4])


@gluon.jit
def load_tile(x, count, STRIDE: gl.constexpr):
    row, at = tile_places(STRIDE)
    return gl.load(x + at, (row < count)[:, None], 0.0).to(gl.float32)


@gluon.jit
def running_sums(x, edges, REVERSE: gl.constexpr):
    """Of the rows of x [64, 64], from the last one on with REVERSE. edges [8, 64]: takes the sums that end eight rows."""
    x = gl.convert_layout(x.reshape([8, 8, 64]), APART)
    y = gl.convert_layout(gl.associative_scan(x, 1, add, reverse=REVERSE), APART)
    own = gl.convert_layout(pick_row(y, 0 if REVERSE else 7), EDGES)
    edges.store(own)
    before = gl.zeros([8, 64], gl.float32, EDGES)
    b = gl.arange(0, 8, gl.SliceLayout(1, EDGES))
    for n in gl.static_range(7):
        if REVERSE:
            before += gl.where((b <= n)[:, None], edges.slice(n + 1, 1).load(EDGES), 0.0)
        else:
            before += gl.where((b > n)[:, None], edges.slice(n, 1).load(EDGES), 0.0)
    edges.store(before + own)
    return gl.convert_layout((y + before[:, None, :]).reshape([64, 64]), TILE)


@gluon.jit
def sum_decays(g, count, edges, STRIDE: gl.constexpr):
    """G [64, 64] in base 2. edges [8, 64]: takes every eighth row."""
    return running_sums(clamp_decay(load_tile(g, count, STRIDE)), edges, False)


@gluon.jit
def at_border(G, edges, half: gl.constexpr):
    """By halves: of every token G [64, 64] at the last token of the left half of its pair of halves."""
    if half < 8:
        parts = G.reshape([32 // half, 2 * half, 64])
        LAYOUT: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        found = gl.convert_layout(pick_row(parts, half - 1), LAYOUT)[:, None, :] + gl.zeros_like(parts)
    else:
        pairs = edges.reshape([32 // half, half // 4, 64]).slice(half // 8 - 1, 1, dim=1)
        zeros = gl.zeros([8, 64], gl.float32, EDGES).reshape([32 // half, half // 4, 64])
        found = gl.convert_layout((pairs.load(zeros.type.layout) + zeros).reshape([8, 64]), EDGES)
        found = found[:, None, :] + gl.zeros([8, 8, 64], gl.float32, APART)
    return gl.convert_layout(found.reshape([64, 64]), TILE)


@gluon.jit
def product(ws, xs):
    """w x^T"""
    fence_async_shared()
    gl.thread_barrier()
    zeros = gl.zeros([64, 64], gl.float32, product_layout(4, 64))
    y = warpgroup_mma(ws, xs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[y])


@gluon.jit
def meet_by_halves(
    ks, qs, ws, edges, q, k, w, g, count,
    PARTS: gl.constexpr, G_ROW: gl.constexpr, KEY_ROW: gl.constexpr, WRITE_ROW: gl.constexpr, SOLVE: gl.constexpr,
):  # fmt: skip
    """w q^T and, with SOLVE, w k^T of pairs i >= j, decayed from one to the other, for queries, keys and write keys q, k and w."""
    TYPE: gl.constexpr = ks.dtype
    SQUARE: gl.constexpr = product_layout(4, 64)
    BY_I: gl.constexpr = gl.SliceLayout(0, SQUARE)
    j = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    i = gl.arange(0, 64, BY_I)
    scores = gl.zeros([64, 64], gl.float32, SQUARE)
    overlap = scores
    for part in range(PARTS):
        G = sum_decays(g, count, edges, G_ROW)
        own = gl.sum(load_tile(q, count, KEY_ROW) * load_tile(w, count, WRITE_ROW), 1)
        scores += gl.where(i[None, :] == j[:, None], gl.convert_layout(own, BY_I)[None, :], 0.0)
        if SOLVE:
            own = gl.sum(load_tile(k, count, KEY_ROW) * load_tile(w, count, WRITE_ROW), 1)
            overlap += gl.where(i[None, :] == j[:, None], gl.convert_layout(own, BY_I)[None, :], 0.0)
        for level in gl.static_range(6):
            factor = approximate(-gl.abs(G - at_border(G, edges, 32 >> level)), "ex2")
            qs.store((load_tile(q, count, KEY_ROW) * factor).to(TYPE))
            ws.store((load_tile(w, count, WRITE_ROW) * factor).to(TYPE))
            if SOLVE:
                ks.store((load_tile(k, count, KEY_ROW) * factor).to(TYPE))
            pairs = ((i >> (5 - level)) & 1 == 1)[None, :] & (((i >> (5 - level)) ^ 1)[None, :] == (j >> (5 - level))[:, None])
            scores += gl.where(pairs, product(ws, qs), 0.0)
            if SOLVE:
                overlap += gl.where(pairs, product(ws, ks), 0.0)
        q += 64
        k += 64
        w += 64
        g += 64
    return scores, overlap


@gluon.jit
def decay_channels(
    ks, qs, ws, q, k, w, g, qg, kg, wg, last, last_gate, count,
    HV: gl.constexpr, G_ROW: gl.constexpr, KEY_ROW: gl.constexpr, WRITE_ROW: gl.constexpr, WRITE: gl.constexpr,
    SOLVE: gl.constexpr,
):  # fmt: skip
    """q exp(G), k exp(G) and w exp(G_C - G) into qg, kg and wg [.., HV, K], exp(G_C) into last [K], and G_C into last_gate, unless
    that is None; w q^T and, with SOLVE, w k^T of pairs i >= j, decayed from one to the other. ks, qs and, with WRITE, ws [64, K] hold k, q and w, and are used up. The rows of what
    g, k and w point to are so far apart."""
    TYPE: gl.constexpr = ks.dtype
    PARTS: gl.constexpr = ks.shape[1] // 64
    FLAT: gl.constexpr = 7.0 if TYPE == gl.float16 else 100.0  # what channels may lose: 2^-FLAT and back are numbers
    edges = gl.allocate_shared_memory(gl.float32, [8, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row, at = tile_places(HV * PARTS * 64)
    here = (row < count)[:, None]
    c = gl.zeros([1, 64], gl.int32, TILE) + gl.arange(0, 64, gl.SliceLayout(0, TILE))[None, :]
    lost = 0.0
    for part in gl.static_range(PARTS):
        G = sum_decays(g + part * 64, count, edges, G_ROW)
        total = edges.slice(7, 1).load(TILE)
        gl.store(last + part * 64 + c, approximate(total, "ex2"))
        if last_gate is not None:
            gl.store(last_gate + part * 64 + c, total)
        lost = gl.maximum(lost, gl.max(gl.max(gl.where(G == G, -G, 0.0), 1), 0))  # NaN does not choose the form
        key_part = ks.slice(part * 64, 64, dim=1)
        query_part = qs.slice(part * 64, 64, dim=1)
        write_part = ws.slice(part * 64, 64, dim=1)
        writes = (write_part if WRITE else key_part).load(TILE).to(gl.float32)
        gl.store(wg + part * 64 + at, (writes * approximate(total - G, "ex2")).to(TYPE), here)
        write_part.store((writes * approximate(-G, "ex2")).to(TYPE))
        since = approximate(G, "ex2")
        keys = (key_part.load(TILE).to(gl.float32) * since).to(TYPE)
        gl.store(kg + part * 64 + at, keys, here)
        key_part.store(keys)
        queries = (query_part.load(TILE).to(gl.float32) * since).to(TYPE)
        gl.store(qg + part * 64 + at, queries, here)
        query_part.store(queries)
    if lost < FLAT:
        scores = product(ws, qs)
        overlap = product(ws, ks) if SOLVE else scores
    else:
        scores, overlap = meet_by_halves(
            ks.slice(0, 64, dim=1), qs.slice(0, 64, dim=1), ws.slice(0, 64, dim=1), edges, q, k, w, g, count,
            PARTS, G_ROW, KEY_ROW, WRITE_ROW, SOLVE,
        )  # fmt: skip
    return scores, overlap


@gluon.jit(do_not_specialize=["time"])
def score_channels(
    q, k, w, beta, g, qg, kg, wg, scores, factors, last_gate, chunks, time, scale,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, HEADS_G: gl.constexpr,
    HEADS_BETA: gl.constexpr,
):  # fmt: skip
    """As `score_chunks`: P into scores [M, HV, 64, 64], exp(G_C) and beta into factors [M, HV, 4, 64], 128 and 64 numbers, and the
    decayed operands of `decay_channels`. w: write keys, None where k writes."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    TYPE: gl.constexpr = q.dtype.element_ty
    SQUARE: gl.constexpr = product_layout(4, 64)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    WRITE_ROW: gl.constexpr = H * K if w is None else HV // HEADS_W * K
    at_key = (first * H + head // (HV // H)) * K
    at_row = (first * HV + head) * K
    at_chunk = m.to(gl.int64) * HV + head
    ks = gl.allocate_shared_memory(TYPE, [64, K], WIDE)
    qs = gl.allocate_shared_memory(TYPE, [64, K], WIDE)
    ws = gl.allocate_shared_memory(TYPE, [64, K], WIDE)
    copy_rows(ks, k + at_key, count, H * K, True)
    copy_rows(qs, q + at_key, count, H * K, True)
    writes = k + at_key
    if w is not None:
        writes = w + (first * (HV // HEADS_W) + head // HEADS_W) * K
        copy_rows(ws, writes, count, WRITE_ROW, True)
    async_copy.commit_group()
    t = gl.arange(0, 64, LINE)
    at_beta = beta + first * (HV // HEADS_BETA) + head // HEADS_BETA
    gain = gl.load(at_beta + t * (HV // HEADS_BETA), t < count, 0.0).to(gl.float32)
    factors += at_chunk * 256
    gl.store(factors + 128 + t, gain)
    async_copy.wait_group(0)
    P, _ = decay_channels(
        ks, qs, ws, q + at_key, k + at_key, writes, g + (first * (HV // HEADS_G) + head // HEADS_G) * K,
        qg + at_row, kg + at_row, wg + at_row, factors, last_gate + at_chunk * K, count,
        HV, HV // HEADS_G * K, H * K, WRITE_ROW, w is not None, False,
    )  # fmt: skip
    i = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    j = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    P = gl.where(i[None, :] >= j[:, None], P * scale, 0.0)
    staged = gl.allocate_shared_memory(TYPE, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], TYPE))
    store_square(staged, P, scores + at_chunk * 4096, 64, 64)


@gluon.jit(do_not_specialize=["time", "stride"])
def gradients_of_channels(
    q, k, w, v, beta, g, last_gate, u, z, do, dP, h, dh, chunks, time, scale, dq, dk, dw, dv, gate_grads, dg, stride,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS_G: gl.constexpr,
    HEADS_BETA: gl.constexpr,
):  # fmt: skip
    """`chunk_gradients_channel` of `common.delta_rule` for 64 of 128 key channels, where their form is flat. Of the others only
    dP, with which that kernel finds their gradients."""
    part, m, head, first, count = program_part(chunks, time, K // 64)
    if count == 0:
        return
    TYPE: gl.constexpr = q.dtype.element_ty
    MIDDLE: gl.constexpr = 7.0 if TYPE == gl.float16 else 64.0
    SQUARE: gl.constexpr = product_layout(4, 64)
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, V], TYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], TYPE)
    KEY_ROW: gl.constexpr = H * K
    at_key = (first * H + head // (HV // H)) * K + part * 64
    at_value = (first * HV + head) * V
    at_row = (first * HV + head) * K + part * 64
    at_state = (m.to(gl.int64) * HV + head) * (K * V) + part * 64 * V
    dos = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    us = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    copy_rows(dos, do + at_value, count, HV * V, True)
    copy_rows(us, u + at_value, count, HV * V, True)
    async_copy.commit_group()
    last_gate += (m.to(gl.int64) * HV + head) * K + part * 64
    total = gl.load(last_gate + gl.arange(0, 64, COLUMN))
    i = gl.arange(0, 64, ROW)
    j = gl.arange(0, 64, COLUMN)
    if -gl.min(total, 0) >= 2 * MIDDLE:
        async_copy.wait_group(0)
        grad_P = gl.where(i[:, None] >= j[None, :], product(dos, us), 0.0)
        row, at = row_places(HV * 64, 64, 64)
        staged = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
        staged.store(grad_P.to(TYPE))
        gl.store(dP + (first * HV + head) * 64 + at, staged.load(at.type.layout), (row < count)[:, None])
        return
    zs = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    hs = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    dhs = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    copy_rows(zs, z + at_value, count, HV * V, True)
    copy_rows(hs, h + at_state, 64, V, False)
    copy_rows(dhs, dh + at_state, 64, V, False)
    async_copy.commit_group()

    # While these come, dV and <z, v>, and the operands of pairs.
    q += at_key
    k += at_key
    gain = beta + (first * (HV // HEADS_BETA) + head // HEADS_BETA)
    t = gl.arange(0, 64, gl.SliceLayout(1, TILE))
    gain = gl.load(gain + t * (HV // HEADS_BETA), t < count, 0.0).to(gl.float32)
    grad_gain = gl.zeros_like(gain)
    if part == 0:
        row, at = tile_places(HV * V)
        for column in gl.static_range(0, V, 64):
            corrected = load_tile(z + at_value + column, count, HV * V)
            gl.store(dv + at_value + column + at, (corrected * gain[:, None]).to(TYPE), (row < count)[:, None])
            grad_gain += gl.sum(corrected * load_tile(v + at_value + column, count, HV * V), 1)
    ks = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    qs = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    ws = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    edges = gl.allocate_shared_memory(gl.float32, [8, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    g += (first * (HV // HEADS_G) + head // HEADS_G) * K + part * 64
    G = sum_decays(g, count, edges, HV // HEADS_G * K)
    if w is None:
        writes = load_tile(k, count, KEY_ROW)
    else:
        at_write = (first * (HV // HEADS_W) + head // HEADS_W) * K + part * 64
        writes = load_tile(w + at_write, count, HV // HEADS_W * K)
    ws.store((writes * approximate(-MIDDLE - G, "ex2")).to(TYPE))
    up = approximate(G + MIDDLE, "ex2")
    qs.store((load_tile(q, count, KEY_ROW) * (up * scale)).to(TYPE))
    ks.store((load_tile(k, count, KEY_ROW) * (up * gain[:, None])).to(TYPE))

    async_copy.wait_group(0)
    zeros = gl.zeros([64, 64], gl.float32, SQUARE)
    grad_P = warpgroup_mma(dos, us.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grad_A = warpgroup_mma(zs, us.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grad_q = warpgroup_mma(dos, hs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grad_k = warpgroup_mma(zs, hs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grad_w = warpgroup_mma(us, dhs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # What follows takes the place of their operands.
    grad_P, grad_A, grad_q, grad_k, grad_w, dos, us, zs = warpgroup_mma_wait(
        0, deps=[grad_P, grad_A, grad_q, grad_k, grad_w, dos, us, zs]
    )
    grad_P = gl.where(i[:, None] >= j[None, :], grad_P, 0.0).to(TYPE)
    grad_A = gl.where(i[:, None] > j[None, :], -grad_A, 0.0).to(TYPE)
    turned_P = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    turned_A = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    turned_P.store(grad_P)
    turned_A.store(grad_A)
    fence_async_shared()
    gl.thread_barrier()  # see `gradients_of_chunk`
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    states = gl.sum(hs.load(ROWS).to(gl.float32) * dhs.load(ROWS).to(gl.float32), 1)
    grad_w *= gl.exp2(total + MIDDLE)[None, :]
    at_end = gl.exp2(total) * gl.convert_layout(states, COLUMN) + gl.sum(ws.load(SQUARE).to(gl.float32) * grad_w, 0)
    grad_q *= 2.0**-MIDDLE
    grad_k *= -(2.0**-MIDDLE)
    left_P = gl.convert_layout(grad_P, LEFT)
    left_A = gl.convert_layout(grad_A, LEFT)
    grad_q = warpgroup_mma(left_P, ws, grad_q, is_async=True)
    grad_k = warpgroup_mma(left_A, ws, grad_k, is_async=True)
    grad_w = warpgroup_mma(turned_P.permute((1, 0)), qs, grad_w, is_async=True)
    grad_w = warpgroup_mma(turned_A.permute((1, 0)), ks, grad_w, is_async=True)
    grad_q, grad_k, left_P, left_A, grad_w = warpgroup_mma_wait(0, deps=[grad_q, grad_k, left_P, left_A, grad_w])

    G = sum_decays(g, count, edges, HV // HEADS_G * K)  # again: kept, it would crowd the registers
    up = approximate(G + MIDDLE, "ex2")
    row, at = tile_places(HV * K)
    at += at_row
    here = (row < count)[:, None]
    found = gl.convert_layout(grad_q, TILE)
    grad_G = qs.load(TILE).to(gl.float32) * found
    gl.store(dq + at, (found * (up * scale)).to(TYPE), here)
    found = gl.convert_layout(grad_w, TILE)
    grad_G -= ws.load(TILE).to(gl.float32) * found
    written = found * approximate(-MIDDLE - G, "ex2")
    found = gl.convert_layout(grad_k, TILE)
    grad_G += ks.load(TILE).to(gl.float32) * found
    found *= up
    grad_gain += gl.sum(load_tile(k, count, KEY_ROW) * found, 1)
    gl.store(gate_grads + part.to(gl.int64) * stride + first * HV + head + t * HV, grad_gain, t < count)
    found *= gain[:, None]
    if w is None:
        found += written
    else:
        gl.store(dw + at, written.to(TYPE), here)
    gl.store(dk + at, found.to(TYPE), here)
    at_end = gl.convert_layout(at_end, gl.SliceLayout(0, TILE))
    grad_G += gl.where((row == count - 1)[:, None], at_end[None, :], 0.0)
    gl.store(dg + at, running_sums(grad_G, edges, True), here)
