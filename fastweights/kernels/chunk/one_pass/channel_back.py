"""The pass of a backward with one decay per key channel, which finds all gradients on its way, in Gluon for Hopper GPUs: see the
head of this folder."""

from __future__ import annotations

from ...common.hopper_tiles import copy_rows, product_layout, row_places, token_layout, unknown_zero
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .back import end_of_segment, place_segment
from .gradients_back import anew, own_sums, row_sums
from .records import T_PLACE, copy_factors
from .segments import program_place, state_addresses
from .write_keys import approximate


@gluon.jit
def copy_first(
    w, do, made, ws, dos, fs, first, m, head, c, live,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RECORD: gl.constexpr,
):  # fmt: skip
    """Begin to copy what a step takes first of chunk c of a segment."""
    token = (anew(first) + anew(c) * 64) * HV + anew(head)
    copy_rows(ws, w + token * K, live, HV * K, True)
    copy_rows(dos, do + token * V, live, HV * V, True)
    copy_factors(fs, made + ((anew(m) + anew(c)) * HV + anew(head)) * RECORD, live > 0)
    async_copy.commit_group()


@gluon.jit
def copy_next(
    q, k, made, qs, ks, Ps, Ts, first, m, head, c, live, HV: gl.constexpr, K: gl.constexpr, RECORD: gl.constexpr
):  # fmt: skip
    """Begin to copy what a step takes next."""
    token = (anew(first) + anew(c) * 64) * HV + anew(head)
    record = made + ((anew(m) + anew(c)) * HV + anew(head)) * RECORD
    whole = gl.where(live > 0, 64, 0)
    copy_rows(qs, q + token * K, live, HV * K, True)
    copy_rows(ks, k + token * K, live, HV * K, True)
    copy_rows(Ps, record, whole, 64, True)
    copy_rows(Ts, record + T_PLACE, whole, 64, True)
    async_copy.commit_group()


@gluon.jit
def copy_state(h, hs, m, head, c, live, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Begin to copy the state at the start of chunk c of a segment."""
    copy_rows(hs, h + ((anew(m) + anew(c)) * HV + anew(head)) * (K * V), gl.where(live > 0, K, 0), V, True)
    async_copy.commit_group()


@gluon.jit
def copy_written(u, us, first, head, c, live, HV: gl.constexpr, V: gl.constexpr):
    """Begin to copy u of chunk c of a segment."""
    copy_rows(us, u + ((anew(first) + anew(c) * 64) * HV + anew(head)) * V, live, HV * V, True)
    async_copy.commit_group()


@gluon.jit
def reverse_cumsum_operand(LEFT: gl.constexpr):
    """A left operand [64, 64] for the reverse cumsum over tokens: 1 where a column is a row's token or a later one, else 0.
    `unknown_zero` hides the values from ptxas: 12.8 loaded constants into registers of an operand behind the product that reads
    them."""
    row = gl.arange(0, 64, gl.SliceLayout(1, LEFT)) + unknown_zero()
    column = gl.arange(0, 64, gl.SliceLayout(0, LEFT))
    return gl.where(column[None, :] >= row[:, None], 1.0, 0.0).to(gl.bfloat16)


@gluon.jit(do_not_specialize=["time", "length", "stride"])
def channel_gradients_back(
    q, k, w, v, gates, made, do, u, h, begin, added, transition, norms, dS, dq, dk, dw, dv, dg, gate_grads, z, dP, dh,
    segments, cu_seqlens, time, length, stride, scale,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RECORD: gl.constexpr, STARTED: gl.constexpr, ENDED: gl.constexpr,
    NORMS: gl.constexpr,
):  # fmt: skip
    """As `gradients_back`, with q, k and w [BT, HV, K] as they decay, q scaled too, and gates [BT, HV, K], exp(G - R): see
    `channel.py`. dg [BT, HV, K]: the gradient of the log decays. gate_grads [K / 64, 2, BT, HV]: of beta from each half of 128
    channels, `stride` from one to the next. dw: None where k writes. Where channels lose too much in a chunk, its z, dP and dh,
    the gradient of exp(-R) times the state behind it, are written, from which `strong_gradients_channel` finds the gradients of
    their half of the channels."""
    TYPE: gl.constexpr = k.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = product_layout(WARPS, K)
    TOKENS: gl.constexpr = product_layout(WARPS, 64)
    WIDE: gl.constexpr = token_layout(K, WARPS)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    BY_CHANNEL: gl.constexpr = gl.SliceLayout(0, WIDE)
    BY_I: gl.constexpr = gl.SliceLayout(1, SQUARE)
    BY_J: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    LEFT_SUM: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    CHANNELS: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([4, 1], [1, 32], [1, WARPS], [1, 0]))
    _, segment, head = program_place(segments, HV, 1)
    first, tokens, m, sequence, earlier, _ = place_segment(segments, cu_seqlens, segment, time, length)
    if (tokens == 0) & (earlier != 0):
        return
    S = end_of_segment(
        begin, added, transition, norms, cu_seqlens, segment, sequence, head, 0, time, length,
        HV, K, V, V, TYPE, True, False, STARTED, NORMS,
    )  # fmt: skip
    chunks = (tokens + 63) // 64
    TALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], TYPE)
    FLOATS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    ws = gl.allocate_shared_memory(TYPE, [2, 64, K], TALL)  # then the upper bits of dG
    dos = gl.allocate_shared_memory(TYPE, [2, 64, V], TALL)  # then dk
    fs = gl.allocate_shared_memory(gl.float32, [2, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    one_q = gl.allocate_shared_memory(TYPE, [1, 64, K], TALL)
    one_k = gl.allocate_shared_memory(TYPE, [1, 64, K], TALL)
    one_u = gl.allocate_shared_memory(TYPE, [1, 64, V], TALL)  # then the lower bits of dG
    one_z = gl.allocate_shared_memory(TYPE, [1, 64, V], TALL)
    one_h = gl.allocate_shared_memory(TYPE, [1, K, V], TALL)
    one_dS = gl.allocate_shared_memory(TYPE, [1, K, V], TALL)  # [keys, values]; then dw and dk, then dg
    one_P = gl.allocate_shared_memory(TYPE, [1, 64, 64], TILE)  # then dP
    one_T = gl.allocate_shared_memory(TYPE, [1, 64, 64], TILE)  # then diag(beta) dA
    one_A = gl.allocate_shared_memory(TYPE, [1, 64, 64], TILE)  # then with 64 channels dk
    ends = gl.allocate_shared_memory(gl.float32, [4, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums = gl.allocate_shared_memory(gl.float32, [2, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    met = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if K == 64:  # dS has no room for dg
        own_g = gl.allocate_shared_memory(gl.float32, [64, K], FLOATS)

    # Copies are begun in this order: [w and dO of n], which step n takes first, [h of n], [q, k, P, T and factors of n], which it
    # takes next, [u of n], [w and dO of n + 1]. Within step n begin [G of n], [h of n + 1] and [q .. of n + 1].
    c = chunks - 1
    left = gl.where(chunks > 0, tokens - c * 64, 0)
    copy_first(w, do, made, ws.index(0), dos.index(0), fs.index(0), first, m, head, c, left, HV, K, V, RECORD)
    copy_state(h, one_h.index(0), m, head, c, left, HV, K, V)
    copy_next(
        q, k, made, one_q.index(0), one_k.index(0), one_P.index(0), one_T.index(0), first, m, head, c, left, HV, K, RECORD
    )  # fmt: skip
    copy_written(u, one_u.index(0), first, head, c, left, HV, V)
    left = gl.where(chunks > 1, 64, 0)
    copy_first(w, do, made, ws.index(1), dos.index(1), fs.index(1), first, m, head, c - 1, left, HV, K, V, RECORD)
    zeros = gl.zeros([V, 64], gl.float32, TOKENS)
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    nothing = gl.zeros([64, K], gl.float32, WIDE)
    onward = reverse_cumsum_operand(LEFT_SUM)
    for n in range(chunks):
        c = chunks - 1 - n
        live = gl.where(n == 0, tokens - (chunks - 1) * 64, 64)
        now = n & 1
        zero = unknown_zero()
        write, grads, line = ws.index(now), dos.index(now), fs.index(now)
        pairs, square, key = one_P.index(zero), one_T.index(zero), one_k.index(zero)
        qs, us, zs, hs = one_q.index(zero), one_u.index(zero), one_z.index(zero), one_h.index(zero)
        dSs, plain_A = one_dS.index(zero), one_A.index(zero)
        async_copy.wait_group(4)
        S *= line.slice(0, K).load(gl.SliceLayout(0, KEYS))[None, :]
        kept = S.to(TYPE)
        low = gl.convert_layout(kept, LEFT_S)
        du = warpgroup_mma(low, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dSs.permute((1, 0)).store(kept)
        async_copy.wait_group(2)
        gl.thread_barrier()
        plain = gl.convert_layout(grads.permute((1, 0)).load(TOKENS), LEFT)
        given = warpgroup_mma(plain, pairs, zeros, use_acc=False, is_async=True)
        read = gl.convert_layout(grads.permute((1, 0)).load(TOKENS), LEFT_S)
        S = warpgroup_mma(read, qs, S, is_async=True)
        du, low, given, plain = warpgroup_mma_wait(1, deps=[du, low, given, plain])
        du = gl.convert_layout((du + given).to(TYPE), LEFT)
        found = warpgroup_mma(du, square, zeros, use_acc=False, is_async=True)
        row, at = row_places(V, K, V)
        end = dSs.load(at.type.layout)
        apart = line.slice(192, 1).load(gl.SliceLayout(1, at.type.layout)) > 0.0
        gl.store(dh + ((anew(m) + anew(c)) * HV + anew(head)) * (K * V) + at, end, ((row < K) & apart)[:, None])
        sums.index(0).store(gl.sum(end.to(gl.float32) * hs.load(at.type.layout).to(gl.float32), 1))
        weight = line.slice(128, 64).load(BY_TOKEN)
        S, read, found, du = warpgroup_mma_wait(0, deps=[S, read, found, du])
        back = gl.convert_layout((-weight[None, :] * found).to(TYPE), LEFT_S)
        S = warpgroup_mma(back, key, S, is_async=True)
        zs.permute((1, 0)).store(found.to(TYPE))
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()  # see `gradients_back`
        grad_A = warpgroup_mma(zs, us.permute((1, 0)), none, use_acc=False, is_async=True)
        grad_P = warpgroup_mma(grads, us.permute((1, 0)), none, use_acc=False, is_async=True)
        grad_w = warpgroup_mma(us, dSs.permute((1, 0)), nothing, use_acc=False, is_async=True)
        grad_k = warpgroup_mma(zs, hs.permute((1, 0)), nothing, use_acc=False, is_async=True)
        S, back, grad_A, grad_P = warpgroup_mma_wait(2, deps=[S, back, grad_A, grad_P])
        i = gl.arange(0, 64, BY_I)
        j = gl.arange(0, 64, BY_J)
        pairs.store(gl.where(i[:, None] >= j[None, :], grad_P, 0.0).to(TYPE))
        grad_A = gl.where(i[:, None] > j[None, :], grad_A, 0.0)
        plain_A.store(grad_A.to(TYPE))
        square.store((grad_A * -line.slice(128, 64).load(BY_I)[:, None]).to(TYPE))
        fence_async_shared()
        gl.thread_barrier()
        grad_k = warpgroup_mma(plain_A, write, grad_k, is_async=True)  # negative
        grad_q = warpgroup_mma(grads, hs.permute((1, 0)), nothing, use_acc=False, is_async=True)
        grad_w = warpgroup_mma_wait(3, deps=[grad_w])
        ends.store(gl.sum((grad_w * ws.index(anew(now)).load(WIDE).to(gl.float32)).reshape([4, 16, K]), 1))
        grad_w = warpgroup_mma(pairs.permute((1, 0)), qs, grad_w, is_async=True)
        grad_w = warpgroup_mma(square.permute((1, 0)), key, grad_w, is_async=True)
        grad_k, grad_q = warpgroup_mma_wait(2, deps=[grad_k, grad_q])
        grad_q = warpgroup_mma(pairs, write, grad_q, is_async=True)
        gl.thread_barrier()

        # dO, u, h and dS are read by none any more
        more = gl.where(n + 1 < chunks, 64, 0)
        copy_state(h, hs, m, head, c - 1, more, HV, K, V)
        token = (anew(first) + anew(c) * 64) * HV + anew(head)
        row, at = row_places(HV * 64, 64, 64)
        apart = line.slice(192, 1).load(gl.SliceLayout(1, at.type.layout)) > 0.0
        gl.store(dP + token * 64 + at, pairs.load(at.type.layout), ((row < live) & apart)[:, None])
        staged_w = dSs.slice(0, 64)
        staged_k = plain_A
        if K == 128:
            staged_k = dSs.slice(64, 64)
        sums.index(1).store(row_sums(own_sums(-grad_k, one_k.index(anew(zero)).load(WIDE))))
        grad_k *= -line.slice(128, 64).load(BY_ROW)[:, None]
        staged_k.store(grad_k.to(TYPE))
        summed = grad_k * one_k.index(anew(zero)).load(WIDE).to(gl.float32)
        grad_w = warpgroup_mma_wait(1, deps=[grad_w])
        staged_w.store(grad_w.to(TYPE))
        summed -= grad_w * ws.index(anew(now)).load(WIDE).to(gl.float32)
        grad_q = warpgroup_mma_wait(0, deps=[grad_q])
        grads.store((grad_q * scale).to(TYPE))
        summed += grad_q * one_q.index(anew(zero)).load(WIDE).to(gl.float32)
        gl.thread_barrier()

        # q, k, P and T neither
        copy_next(q, k, made, qs, key, pairs, square, first, m, head, c - 1, more, HV, K, RECORD)
        sums.index(0).store(sums.index(0).load(CHANNELS) + gl.sum(ends.load(CHANNELS.parent), 0))
        # Sums of dG from a token on are products of a triangle with the upper and the lower bits of dG.
        upper = write._reinterpret(gl.bfloat16, [64, K], TALL)
        lower = us._reinterpret(gl.bfloat16, [64, K], TALL)
        high = (summed.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        upper.store(high.to(gl.bfloat16))
        lower.store((summed - high).to(gl.bfloat16))
        token = (anew(first) + anew(c) * 64) * HV + anew(head)
        row, at = row_places(HV * K, 64, K)
        here = (row < live)[:, None]
        since = gl.load(gates + token * K + at, here, 0.0).to(gl.float32)
        values = gl.load(v + token * V + at, here, 0.0)
        fence_async_shared()
        gl.thread_barrier()
        summed = warpgroup_mma(onward, upper, nothing, use_acc=False, is_async=True)
        summed = warpgroup_mma(onward, lower, summed, is_async=True)
        corrected = zs.load(at.type.layout)
        apart = line.slice(192, 1).load(gl.SliceLayout(1, at.type.layout)) > 0.0
        gl.store(z + token * V + at, corrected, ((row < live) & apart)[:, None])
        corrected = corrected.to(gl.float32)
        met.store(gl.sum(corrected * values.to(gl.float32), 1))
        corrected *= line.slice(128, 64).load(gl.SliceLayout(1, at.type.layout))[:, None]
        gl.store(dv + token * V + at, corrected.to(TYPE), here)
        gl.store(dq + token * K + at, (grads.load(at.type.layout).to(gl.float32) * since).to(TYPE), here)
        grad_k = staged_k.load(at.type.layout).to(gl.float32) * since
        grad_w = staged_w.load(at.type.layout).to(gl.float32) * approximate(since, "rcp")
        if dw is None:
            grad_k += grad_w
        else:
            gl.store(dw + token * K + at, grad_w.to(TYPE), here)
        gl.store(dk + token * K + at, grad_k.to(TYPE), here)
        summed, onward = warpgroup_mma_wait(0, deps=[summed, onward])
        gl.thread_barrier()
        summed += sums.index(0).load(BY_CHANNEL)[None, :]
        staged_g = own_g if K == 64 else dSs._reinterpret(gl.float32, [64, K], FLOATS)
        staged_g.store(summed)
        gl.thread_barrier()
        token = (anew(first) + anew(c) * 64) * HV + anew(head)
        row, at = row_places(HV * K, 64, K, 4)
        gl.store(dg + token * K + at, staged_g.load(at.type.layout), (row < live)[:, None])
        t = gl.arange(0, 64, LINE)
        at_gate = gate_grads + token + t * HV
        gl.store(at_gate, met.load(LINE) + sums.index(1).slice(0, 64).load(LINE), t < live)
        if K == 128:
            gl.store(at_gate + stride, sums.index(1).slice(64, 64).load(LINE), t < live)
        S *= fs.index(anew(now)).slice(0, K).load(gl.SliceLayout(0, KEYS))[None, :]
        gl.thread_barrier()
        copy_written(u, us, first, head, c - 1, more, HV, V)
        more = gl.where(n + 2 < chunks, 64, 0)
        copy_first(w, do, made, write, grads, line, first, m, head, c - 2, more, HV, K, V, RECORD)
    async_copy.wait_group(0)
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if earlier == 0:
            gl.store(state_addresses(dS, sequence * HV + head, 0, K, V, V), S)
