"""The gradients of one chunk, after the passes, in Gluon for Hopper GPUs; see the head of this folder."""

from __future__ import annotations

from ...common.packing import program_part
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .passes import copy_rows, factors_of, product_layout, row_places
from .write_keys import add


@gluon.jit
def row_sums(x, y):
    return gl.sum(x * y.to(gl.float32), 1)


@gluon.jit(do_not_specialize=["time", "stride"])
def gradients_of_chunk(
    q, k, w, v, made, u, z, do, h, dh, chunks, time, scale, dq, dk, dw, dv, gate_grads, stride,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RECORD: gl.constexpr,
    DELTA: gl.constexpr, DECAY: gl.constexpr,
):  # fmt: skip
    """All gradients of a chunk for 64 of 128 key channels, as `chunk_gradients` of `common.delta_rule`, dP among them; dV and
    <z, v> for as many value columns. w: write keys, and dw their gradient, None where k writes and dk holds both. Without
    DELTA, for linear attention, u is v and there is no z; dV is known."""
    part, m, head, first, count = program_part(chunks, time, K // 64)
    if count == 0:
        return
    TYPE: gl.constexpr = q.dtype.element_ty
    SQUARE: gl.constexpr = product_layout(4, 64)
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, V], TYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], TYPE)
    at_key = (first * H + head // (HV // H)) * K + part * 64
    at_value = (first * HV + head) * V
    at_row = (first * HV + head) * K + part * 64
    at_state = (m.to(gl.int64) * HV + head) * (K * V) + part * 64 * V
    dos = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    us = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    zs = us
    if DELTA:
        zs = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    hs = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    dhs = gl.allocate_shared_memory(TYPE, [64, V], WIDE)
    copy_rows(dos, do + at_value, count, HV * V, True)
    copy_rows(us, u + at_value, count, HV * V, True)
    if DELTA:
        copy_rows(zs, z + at_value, count, HV * V, True)
    copy_rows(hs, h + at_state, 64, V, False)
    copy_rows(dhs, dh + at_state, 64, V, False)
    async_copy.commit_group()
    ks = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    qs = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    copy_rows(ks, k + at_key, count, H * K, True)
    copy_rows(qs, q + at_key, count, H * K, True)
    ws = ks
    if w is not None:
        ws = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
        at_write = (first * (HV // HEADS_W) + head // HEADS_W) * K + part * 64
        copy_rows(ws, w + at_write, count, HV // HEADS_W * K, True)
    async_copy.commit_group()

    i = gl.arange(0, 64, ROW)
    j = gl.arange(0, 64, COLUMN)
    factors = factors_of(made + (m.to(gl.int64) * HV + head) * RECORD)
    since = gl.load(factors + i)
    until = gl.load(factors + 64 + i)
    if DELTA:
        gain = gl.load(factors + 128 + i)
    if DECAY:
        from_i = gl.load(factors + 192 + i)
        from_j = gl.load(factors + 192 + j)

    # dV and <z, v> of 64 value columns
    row, at = row_places(HV * V, 64, 64)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, at.type.layout)
    if DELTA:
        values = gl.load(v + at_value + part * 64 + at, (row < count)[:, None], 0.0)

    async_copy.wait_group(1)
    zeros = gl.zeros([64, 64], gl.float32, SQUARE)
    grad_P = warpgroup_mma(dos, us.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if DELTA:
        grad_A = warpgroup_mma(zs, us.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grad_q = warpgroup_mma(dos, hs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if DELTA:
        grad_k = warpgroup_mma(zs, hs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grad_w = warpgroup_mma(us, dhs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if DELTA:
        written = (
            zs.slice(0, 64, dim=1).load(at.type.layout) if part == 0 else zs.slice(64, 64, dim=1).load(at.type.layout)
        )
        written = written.to(gl.float32)
        grad_gain = gl.convert_layout(row_sums(written, values), ROW)
        grad_v = written * gl.convert_layout(gain, BY_ROW)[:, None]
        gl.store(dv + at_value + part * 64 + at, grad_v.to(TYPE), (row < count)[:, None])
    if not DELTA:
        grad_P = warpgroup_mma_wait(2, deps=[grad_P])
    elif w is None:
        grad_P, grad_A = warpgroup_mma_wait(3, deps=[grad_P, grad_A])
    else:  # what follows takes the place of their operands
        grad_P, grad_A, grad_q, grad_k, grad_w, dos, us, zs = warpgroup_mma_wait(
            0, deps=[grad_P, grad_A, grad_q, grad_k, grad_w, dos, us, zs]
        )
    grad_P *= scale
    if DECAY:
        pair = gl.exp2(gl.where(i[:, None] >= j[None, :], from_i[:, None] - from_j[None, :], 0.0))
        grad_P *= pair
    grad_P = gl.where(i[:, None] >= j[None, :], grad_P, 0.0)
    turned_P = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    turned_P.store(grad_P.to(TYPE))
    if DELTA:
        if DECAY:
            grad_A *= pair
        grad_A = gl.where(i[:, None] > j[None, :], -grad_A, 0.0)
        turned_A = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
        turned_A.store((grad_A * gain[:, None]).to(TYPE))
    fence_async_shared()
    # Without this the assembler may read what is loaded next before it is there: it waits for the fence by the same scoreboard.
    gl.thread_barrier()
    # A product reads its operands until it is waited for: named in the wait, nothing takes their place before.
    if not DELTA:
        grad_q, grad_w, dos, us = warpgroup_mma_wait(0, deps=[grad_q, grad_w, dos, us])
    elif w is None:
        grad_q, grad_k, grad_w, dos, us, zs = warpgroup_mma_wait(0, deps=[grad_q, grad_k, grad_w, dos, us, zs])
    async_copy.wait_group(0)
    grad_q *= (since * scale)[:, None]
    if DELTA:
        grad_k *= -since[:, None]
    grad_w *= until[:, None]
    keys = ks.load(SQUARE)
    if DECAY:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        states = row_sums(hs.load(ROWS).to(gl.float32), dhs.load(ROWS))
        grad_last = gl.load(factors + 63) * gl.convert_layout(states, ROW)
        grad_last += row_sums(grad_w, keys if w is None else ws.load(SQUARE))
    left_P = gl.convert_layout(grad_P.to(TYPE), LEFT)
    grad_q = warpgroup_mma(left_P, ws, grad_q, is_async=True)
    if DELTA:
        left_A = gl.convert_layout(grad_A.to(TYPE), LEFT)
        grad_k = warpgroup_mma(left_A, ws, grad_k, is_async=True)
    grad_w = warpgroup_mma(turned_P.permute((1, 0)), qs, grad_w, is_async=True)
    gate_grads += part.to(gl.int64) * stride + first * HV + head
    if DELTA:
        grad_w = warpgroup_mma(turned_A.permute((1, 0)), ks, grad_w, is_async=True)
        grad_q, grad_k, left_P, left_A = warpgroup_mma_wait(2, deps=[grad_q, grad_k, left_P, left_A])
        overlap = row_sums(grad_k, keys)
        gl.store(gate_grads + i * HV, grad_gain + overlap, i < count)
        summed = row_sums(grad_q, qs.load(SQUARE)) + overlap * gain
    else:
        grad_q, left_P = warpgroup_mma_wait(1, deps=[grad_q, left_P])
        summed = row_sums(grad_q, qs.load(SQUARE))
    grad_w = warpgroup_mma_wait(0, deps=[grad_w])
    summed -= row_sums(grad_w, keys if w is None else ws.load(SQUARE))
    if DECAY:
        summed = gl.convert_layout(gl.where(i < count, summed, 0.0), LINE)
        last = gl.sum(gl.convert_layout(grad_last, LINE), 0)
        t = gl.arange(0, 64, LINE)
        summed = gl.where(t == count - 1, summed + last, summed)
        summed = gl.associative_scan(summed, 0, add, reverse=True)
        gl.store(gate_grads + stride // 2 + t * HV, summed, t < count)
    staged = gl.allocate_shared_memory(TYPE, [64, 64], NARROW)
    row, at = row_places(HV * K, 64, 64)
    staged.store(grad_q.to(TYPE))
    gl.store(dq + at_row + at, staged.load(at.type.layout), (row < count)[:, None])
    if DELTA:
        grad_k *= gain[:, None]
        if w is None:
            grad_k += grad_w
    else:
        grad_k = grad_w
    staged.store(grad_k.to(TYPE))
    gl.store(dk + at_row + at, staged.load(at.type.layout), (row < count)[:, None])
    if w is not None:
        staged.store(grad_w.to(TYPE))
        gl.store(dw + at_row + at, staged.load(at.type.layout), (row < count)[:, None])
