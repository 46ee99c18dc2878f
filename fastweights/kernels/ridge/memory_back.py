"""The gradients of a chunk of the memory from its states, in Gluon for Hopper GPUs: `value_grads` and, without pairs,
`chunk_gradients` of common/delta_rule in one program, which reads every tile once."""

from __future__ import annotations

from ..common.hopper_tiles import add, copy_rows, product_layout
from ..common.packing import program_chunk
from ..runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .solve_systems import as_square, store_tokens


@gluon.jit
def state_overlap(hs, ds):
    """<h, dh>."""
    K: gl.constexpr = hs.shape[0]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    met = gl.zeros([64, K], gl.float32, ROWS)
    for part in gl.static_range(K // 64):
        given = hs.slice(part * 64, 64).load(ROWS).to(gl.float32)
        met += given * ds.slice(part * 64, 64).load(ROWS).to(gl.float32)
    return gl.sum(gl.sum(met, 1), 0)


@gluon.jit(do_not_specialize=["time", "stride"])
def memory_back(
    y, y_rest, writes, v, do, gate, h, dh, dv, dP, dy, d_writes, gate_grads, chunks, time, stride,
    HV: gl.constexpr, K: gl.constexpr, HEADS_W: gl.constexpr,
):  # fmt: skip
    """dv [BT, HV, K], dP [BT, HV, 64], and in float32 dy and d_writes [BT, HV, K], of one chunk of one head. y, y_rest: what the
    memory is asked, as the sum of two; writes: its keys; h, dh [M, HV, K, K]: the states at the chunks' starts and the gradients
    of those at their ends. d_writes and the log decays' gradients, gate_grads [1, 2, BT, HV] after `stride` // 2, lack what
    tokens of the chunk do to each other."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    TYPE: gl.constexpr = v.dtype.element_ty
    WIDE: gl.constexpr = product_layout(4, K)
    SQUARE: gl.constexpr = product_layout(4, 64)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    TALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    asked = gl.allocate_shared_memory(TYPE, [2, 64, K], TALL)  # then dh
    ws = gl.allocate_shared_memory(TYPE, [64, K], TALL)
    vs = gl.allocate_shared_memory(TYPE, [64, K], TALL)
    dos = gl.allocate_shared_memory(TYPE, [64, K], TALL)  # then dv
    hs = gl.allocate_shared_memory(TYPE, [K, K], gl.NVMMASharedLayout.get_default_for([K, K], TYPE))
    token = first * HV + head
    number = m.to(gl.int64) * HV + head
    WRITE_ROW: gl.constexpr = HV // HEADS_W * K
    copy_rows(asked.index(0), y + token * K, count, HV * K, True)
    copy_rows(asked.index(1), y_rest + token * K, count, HV * K, True)
    copy_rows(ws, writes + (first * (HV // HEADS_W) + head // HEADS_W) * K, count, WRITE_ROW, True)
    copy_rows(dos, do + token * K, count, HV * K, True)
    copy_rows(vs, v + token * K, count, HV * K, True)
    copy_rows(hs, h + number * (K * K), K, K, False)
    async_copy.commit_group()

    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    c = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    t = gl.arange(0, 64, LINE)
    decays = gate + token  # past the end the last decay: no overflow
    decay = gl.load(decays + gl.minimum(c, count - 1) * HV)
    gap = decay[None, :] - gl.load(decays + gl.minimum(i, count - 1) * HV)[:, None]
    since = gl.load(decays + gl.minimum(row, count - 1) * HV)
    total = gl.load(decays + (count - 1) * HV)
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    nothing = gl.zeros([64, K], gl.float32, WIDE)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    scores = warpgroup_mma(ws, asked.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma(ws, asked.index(1).permute((1, 0)), scores, is_async=True)
    grad_P = warpgroup_mma(dos, vs.permute((1, 0)), none, use_acc=False, is_async=True)
    grad_y = warpgroup_mma(dos, hs.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores, grad_P = warpgroup_mma_wait(1, deps=[scores, grad_P])
    later, earlier = c[None, :] >= i[:, None], c[None, :] <= i[:, None]
    scores = gl.where(later, scores * gl.exp2(gl.where(later, gap, 0.0)), 0.0)  # of a key and a later token
    grad_P = gl.where(earlier, grad_P * gl.exp2(gl.where(earlier, -gap, 0.0)), 0.0).to(TYPE)
    at_pair = i[:, None] * (HV * 64) + c[None, :]
    gl.store(dP + token * 64 + at_pair, grad_P, (i < count)[:, None])
    left = gl.convert_layout(scores.to(TYPE), LEFT)
    grad_v = warpgroup_mma(left, dos, nothing, use_acc=False, is_async=True)
    grad_y = warpgroup_mma_wait(1, deps=[grad_y])
    grad_y *= gl.exp2(since)[:, None]
    both = asked.index(0).load(WIDE).to(gl.float32) + asked.index(1).load(WIDE).to(gl.float32)
    summed = gl.sum(both * grad_y, 1)
    gl.thread_barrier()  # what was asked is read no more
    ds = as_square(asked, TYPE)
    copy_rows(ds, dh + number * (K * K), K, K, False)
    async_copy.commit_group()
    left_P = gl.convert_layout(grad_P, LEFT)
    grad_y = warpgroup_mma(left_P, ws, grad_y, is_async=True)
    grad_y, left_P, grad_v, left = warpgroup_mma_wait(0, deps=[grad_y, left_P, grad_v, left])
    at, live = token * K + row[:, None] * (HV * K) + column[None, :], (row < count)[:, None]
    gl.store(dy + at, grad_y, live)

    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    across = warpgroup_mma(ws, ds, nothing, use_acc=False, is_async=True)
    grad_w = warpgroup_mma(vs, ds.permute((1, 0)), nothing, use_acc=False, is_async=True)
    across, grad_w = warpgroup_mma_wait(0, deps=[across, grad_w])
    overlap = state_overlap(hs, ds)
    until = gl.exp2(total - since)[:, None]
    grad_v += across * until
    grad_w *= until
    along = gl.sum(ws.load(WIDE).to(gl.float32) * grad_w, 1)
    gl.store(d_writes + at, grad_w, live)
    store_tokens(dos, grad_v, dv + token * K, count, HV * K)
    last = gl.exp2(total) * overlap + gl.sum(along, 0)
    change = gl.convert_layout(summed - along, LINE)
    change = gl.where(t < count, gl.where(t == count - 1, change + last, change), 0.0)
    change = gl.associative_scan(change, 0, add, reverse=True)
    gl.store(gate_grads + stride // 2 + token + t * HV, change, t < count)
