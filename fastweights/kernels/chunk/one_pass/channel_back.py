"""What a backward finds of one chunk alone with one decay per key channel, in Gluon for Hopper GPUs: see `gradients.py`."""

from __future__ import annotations

from ...common.packing import program_chunk, program_part
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .channel import TILE, decay_channels, load_tile, running_sums, sum_decays, tile_places
from .passes import copy_rows, product_layout, row_places, store_square
from .write_keys import approximate


@gluon.jit(do_not_specialize=["time"])
def score_channels(
    q, k, w, beta, g, qg, kg, wg, scores, factors, last_gate, chunks, time, scale,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, HEADS_G: gl.constexpr,
    HEADS_BETA: gl.constexpr,
):  # fmt: skip
    """As `score_chunks`: P into scores [M, HV, 64, 64], exp(G_C) [128] and beta [64] into factors [M, HV, 4, 64], and what
    `decay_channels` leaves. w: write keys, None where k writes."""
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
    G_ROW: gl.constexpr = HV // HEADS_G * K
    g += (first * (HV // HEADS_G) + head // HEADS_G) * K
    decays = load_tile(g, count, G_ROW)
    decays_beyond = load_tile(g + 64, count, G_ROW)
    async_copy.wait_group(0)
    P, _ = decay_channels(
        ks, qs, ws, q + at_key, k + at_key, writes, g, decays, decays_beyond,
        qg + at_row, kg + at_row, wg + at_row, factors, last_gate + at_chunk * K, count,
        HV, G_ROW, H * K, WRITE_ROW, w is not None, False,
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
    MIDDLE: gl.constexpr = 7.0 if q.dtype.element_ty == gl.float16 else 64.0
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
        zeros = gl.zeros([64, 64], gl.float32, SQUARE)
        grad_P = warpgroup_mma(dos, us.permute((1, 0)), zeros, use_acc=False, is_async=True)
        grad_P = gl.where(i[:, None] >= j[None, :], warpgroup_mma_wait(0, deps=[grad_P]), 0.0)
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
    G = sum_decays(load_tile(g, count, HV // HEADS_G * K), edges)
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

    # G again: kept, it would crowd the registers.
    G = sum_decays(load_tile(g, count, HV // HEADS_G * K), edges)
    moved = gl.allocate_shared_memory(gl.float32, [64, 64], gl.SwizzledSharedLayout(4, 2, 8, [1, 0]))
    moved.store(G)
    G = moved.load(SQUARE)
    up = approximate(G + MIDDLE, "ex2")
    grad_G = qs.load(SQUARE).to(gl.float32) * grad_q - ws.load(SQUARE).to(gl.float32) * grad_w
    grad_G += ks.load(SQUARE).to(gl.float32) * grad_k
    grad_q *= up * scale
    grad_w *= approximate(-MIDDLE - G, "ex2")
    grad_k *= up
    ks.store(load_tile(k, count, KEY_ROW).to(TYPE))
    overlap = gl.sum(ks.load(SQUARE).to(gl.float32) * grad_k, 1)
    gain = gl.convert_layout(gain, ROW)
    grad_gain = gl.convert_layout(grad_gain, ROW) + overlap
    gl.store(gate_grads + part.to(gl.int64) * stride + first * HV + head + i * HV, grad_gain, i < count)
    grad_k *= gain[:, None]
    if w is None:
        grad_k += grad_w
    row, at = row_places(HV * K, 64, 64)
    here = (row < count)[:, None]
    qs.store(grad_q.to(TYPE))
    gl.store(dq + at_row + at, qs.load(at.type.layout), here)
    ks.store(grad_k.to(TYPE))
    gl.store(dk + at_row + at, ks.load(at.type.layout), here)
    if w is not None:
        ws.store(grad_w.to(TYPE))
        gl.store(dw + at_row + at, ws.load(at.type.layout), here)
    at_end = gl.convert_layout(at_end, COLUMN)
    grad_G += gl.where(i[:, None] == count - 1, at_end[None, :], 0.0)
    moved.store(grad_G)
    row, at = tile_places(HV * K)
    gl.store(dg + at_row + at, running_sums(moved.load(TILE), edges, True), (row < count)[:, None])
