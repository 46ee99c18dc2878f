"""The backward with one decay per key channel, in Gluon for Hopper GPUs: the tokens as they decay again, the pass back, and all
gradients of a chunk; see the head of this folder."""

from __future__ import annotations

from ...common.packing import program_chunk, program_part
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .back import chunk_before, copy_back, end_of_segment, place_segment
from .channel import TILE, decay_channels, load_tile, running_sums, sum_decays, tile_places
from .passes import copy_rows, product_layout, row_places, state_addresses, store_rows
from .write_keys import approximate


@gluon.jit(do_not_specialize=["time"])
def decay_again(
    q, k, w, g, qg, kg, wg, last_gate, chunks, time,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, HEADS_G: gl.constexpr,
):  # fmt: skip
    """What `decay_channels` leaves, without products. w: write keys, None where k writes."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    TYPE: gl.constexpr = q.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    WRITE_ROW: gl.constexpr = H * K if w is None else HV // HEADS_W * K
    G_ROW: gl.constexpr = HV // HEADS_G * K
    at_key = (first * H + head // (HV // H)) * K
    at_row = (first * HV + head) * K
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
    g += (first * (HV // HEADS_G) + head // HEADS_G) * K
    g_low = load_tile(g, count, G_ROW)
    g_high = load_tile(g + 64, count, G_ROW)
    async_copy.wait_group(0)
    decay_channels(
        ks, qs, ws, q + at_key, k + at_key, writes, g, g_low, g_high, qg + at_row, kg + at_row, wg + at_row, None,
        last_gate + (m.to(gl.int64) * HV + head) * K, count, HV, G_ROW, H * K, WRITE_ROW, w is not None, False,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["time", "length"])
def pass_channels_back(
    q, k, w, made, do, z, begin, added, transition, norms, dh, dS, segments, cu_seqlens, time, length, scale,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, RECORD: gl.constexpr,
    STARTED: gl.constexpr, ENDED: gl.constexpr, NORMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: the gradients of the states at the chunks' ends dh [M, HV, K, V], and z = T^T du
    [BT, HV, V]. q, k and w [BT, HV, K]: as they decay. made: see `solve_chunks`. begin: the gradient of the states after the
    sequences, dS of those before. added: see `summarize_back`."""
    WARPS: gl.constexpr = gl.num_warps()
    TYPE: gl.constexpr = k.dtype.element_ty
    KEYS: gl.constexpr = product_layout(WARPS, K)
    TOKENS: gl.constexpr = product_layout(WARPS, 64)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    KEY_ROW: gl.constexpr = HV * K
    VALUE_ROW: gl.constexpr = HV * V
    PARTS: gl.constexpr = V // BV
    part, segment, head = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS, gl.program_id(1)
    first, tokens, m, sequence, earlier = place_segment(segments, cu_seqlens, segment, time, length)
    if (tokens == 0) & (earlier != 0):
        return
    S = end_of_segment(
        begin, added, transition, norms, cu_seqlens, segment, sequence, head, part, time, length,
        HV, K, V, BV, TYPE, True, STARTED, NORMS,
    )  # fmt: skip
    chunks = (tokens + 63) // 64
    t = first + (chunks - 1).to(gl.int64) * 64
    m += chunks - 1
    at_key = (t * HV + head) * K
    at_value = (t * HV + head) * V + part * BV
    q += at_key
    k += at_key
    w += at_key
    made += (m * HV + head) * RECORD
    do += at_value
    z += at_value
    dh += (m * HV + head) * (K * V) + part * BV
    TALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], TYPE)
    ks = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], TALL)
    ws = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], TALL)
    qs = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], TALL)
    dos = gl.allocate_shared_memory(TYPE, [STAGES, 64, BV], gl.NVMMASharedLayout.get_default_for([64, BV], TYPE))
    Ts = gl.allocate_shared_memory(TYPE, [STAGES, 64, 64], SQUARE)
    Ps = gl.allocate_shared_memory(TYPE, [STAGES, 64, 64], SQUARE)
    fs = gl.allocate_shared_memory(gl.float32, [STAGES, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    staged = gl.allocate_shared_memory(TYPE, [K, BV], gl.NVMMASharedLayout.get_default_for([K, BV], TYPE))
    left = gl.where(chunks > 0, tokens - (chunks - 1) * 64, 0)  # tokens of the chunk that is copied, 0 before the first
    last = left
    for ahead in gl.static_range(STAGES - 1):
        copy_back(ks, ws, Ps, Ts, qs, dos, fs, ahead, k, w, made, q, do, left, KEY_ROW, KEY_ROW, VALUE_ROW, True)
        left = gl.where(chunks > ahead + 1, 64, 0)
        q, k, made, do = chunk_before(q, k, made, do, HV * RECORD, KEY_ROW, VALUE_ROW)
        w -= 64 * KEY_ROW
    zeros = gl.zeros([BV, 64], gl.float32, TOKENS)
    now = 0
    into = STAGES - 1
    for n in range(chunks):
        async_copy.wait_group(STAGES - 2)
        kept = S.to(TYPE)
        low = gl.convert_layout(kept, LEFT_S)
        du = warpgroup_mma(low, ws.index(now).permute((1, 0)), zeros, use_acc=False, is_async=True)
        store_rows(staged, kept, dh, K, V)
        dh -= HV * K * V
        grad = dos.index(now).permute((1, 0)).load(TOKENS)
        weight = fs.index(now).slice(128, 64).load(gl.SliceLayout(0, TOKENS))
        total = fs.index(now).slice(0, K).load(gl.SliceLayout(0, KEYS))
        left = gl.where(n + STAGES - 1 < chunks, 64, 0)
        copy_back(ks, ws, Ps, Ts, qs, dos, fs, into, k, w, made, q, do, left, KEY_ROW, KEY_ROW, VALUE_ROW, True)
        plain = gl.convert_layout(grad, LEFT)
        given = warpgroup_mma(plain, Ps.index(now), zeros, use_acc=False, is_async=True)
        du, low, given, plain = warpgroup_mma_wait(0, deps=[du, low, given, plain])
        du = gl.convert_layout((du + given).to(TYPE), LEFT)
        found = warpgroup_mma(du, Ts.index(now), zeros, use_acc=False, is_async=True)
        S *= total[None, :]
        grad = gl.convert_layout((grad.to(gl.float32) * scale).to(TYPE), LEFT_S)
        S = warpgroup_mma(grad, qs.index(now), S, is_async=True)
        found, du = warpgroup_mma_wait(1, deps=[found, du])
        back = gl.convert_layout((-weight[None, :] * found).to(TYPE), LEFT_S)
        S = warpgroup_mma(back, ks.index(now), S, is_async=True)
        store_rows(staged.slice(0, 64), found.to(TYPE), z, gl.where(n > 0, 64, last), VALUE_ROW)
        z -= 64 * VALUE_ROW
        q, k, made, do = chunk_before(q, k, made, do, HV * RECORD, KEY_ROW, VALUE_ROW)
        w -= 64 * KEY_ROW
        S, grad, back = warpgroup_mma_wait(0, deps=[S, grad, back])
        now = gl.where(now == STAGES - 1, 0, now + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    async_copy.wait_group(0)
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if earlier == 0:
            gl.store(state_addresses(dS, sequence * HV + head, part, K, V, BV), S)


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
    gl.thread_barrier()  # see `gradients_back`
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
