"""The pass of a backward that finds all gradients on its way, in Gluon for Hopper GPUs: see the head of this folder.

A warp has 16 value columns. With 128 columns, 256 threads have all registers there are. What a step computes early and needs
late waits in shared memory (`sums`). What all steps compute alike, addresses above all, each computes again (`anew`). Spilled
registers would come from the L2 cache, as shared memory leaves little of L1."""

from __future__ import annotations

from ...common.hopper_tiles import add, copy_rows, product_layout, row_places, token_layout, unknown_zero
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .back import end_of_segment, place_segment
from .records import T_PLACE, copy_factors
from .segments import program_place, state_addresses


@gluon.jit
def anew(x):
    """x, from which the compiler computes nothing ahead."""
    return x + unknown_zero()


@gluon.jit
def own_sums(x, y):
    """Of x y [64, 64 columns per warpgroup] the sums over what a thread has of a row [64, warpgroups, 4]."""
    return gl.sum(gl.sum((x * y.to(gl.float32)).reshape([64, x.shape[1] // 64, 8, 4, 2]), 4), 2)


@gluon.jit
def row_sums(x):
    """What threads have of rows, added up within warps [64 warpgroups]: the rows of one warpgroup, then of the other."""
    return gl.sum(x, 2).permute((1, 0)).reshape([64 * x.shape[1]])


@gluon.jit
def load_sums(buffer, LAYOUT: gl.constexpr):
    sums = buffer.slice(0, 64).load(LAYOUT)
    if buffer.shape[0] == 128:
        sums += buffer.slice(64, 64).load(LAYOUT)
    return sums


@gluon.jit
def copy_early(
    writes, do, made, ws, dos, Ps, Ts, fs, first, m, head, c, live,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RECORD: gl.constexpr,
    DELTA: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Begin to copy what a step needs first of chunk c of a segment."""
    c, first, m, head = anew(c), anew(first), anew(m), anew(head)
    t, record = first + c * 64, made + ((m + c) * HV + head) * RECORD
    whole = gl.where(live > 0, 64, 0)
    copy_rows(ws, writes + (t * (HV // GROUP) + head // GROUP) * K, live, HV // GROUP * K, True)
    copy_rows(dos, do + (t * HV + head) * V, live, HV * V, True)
    copy_rows(Ps, record, whole, 64, True)
    if not LATE:
        if DELTA:
            copy_rows(Ts, record + T_PLACE, whole, 64, True)
        copy_factors(fs, record, live > 0)
    async_copy.commit_group()


@gluon.jit
def copy_states(
    u, h, us, hs, first, m, head, c, live, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Begin to copy u and the state at the start of chunk c of a segment."""
    c, first, m, head = anew(c), anew(first), anew(m), anew(head)
    copy_rows(us, u + ((first + c * 64) * HV + head) * V, live, HV * V, True)
    copy_rows(hs, h + ((m + c) * HV + head) * (K * V), gl.where(live > 0, K, 0), V, True)
    async_copy.commit_group()


@gluon.jit
def copy_late(
    q, k, made, qs, ks, Ts, fs, first, m, head, c, live,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, RECORD: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Begin to copy the queries of chunk c of a segment, with LATE also what there is room for once."""
    c, first, m, head = anew(c), anew(first), anew(m), anew(head)
    at = ((first + c * 64) * H + head // (HV // H)) * K
    copy_rows(qs, q + at, live, H * K, True)
    if LATE:
        copy_rows(ks, k + at, live, H * K, True)
        record = made + ((m + c) * HV + head) * RECORD
        copy_rows(Ts, record + T_PLACE, gl.where(live > 0, 64, 0), 64, True)
        copy_factors(fs, record, live > 0)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["time", "length", "stride"])
def gradients_back(
    q, k, w, v, made, do, u, h, begin, added, transition, norms, dS, dq, dk, dw, dv, gate_grads, segments, cu_seqlens,
    time, length, stride, scale,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RECORD: gl.constexpr,
    DELTA: gl.constexpr, LASTING: gl.constexpr, DECAY: gl.constexpr, STARTED: gl.constexpr, ENDED: gl.constexpr,
    NORMS: gl.constexpr,
):  # fmt: skip
    """From the last chunk of a segment to the first: dq, dk, dv of the value heads [BT, HV, K or V], and the gradients of beta
    and of the log decays, `stride` apart in gate_grads [2, BT, HV]. w: write keys, and dw their gradient, None where k writes and
    dk holds both. Without DELTA, for linear attention, u is v, and there is no z and no beta. made: see `solve_chunks`; h: see
    `states_again`. begin: the gradient of the states after the sequences, dS of those before; added, transition, norms: see
    `end_of_segment`. Each of two warpgroups has half of the values of dS^T [values, keys], and half of the channels of dq, dk and
    dw; with 64 values and channels there is one."""
    TYPE: gl.constexpr = k.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = product_layout(WARPS, K)
    TOKENS: gl.constexpr = product_layout(WARPS, 64)
    WIDE: gl.constexpr = token_layout(K, WARPS)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    BY_I: gl.constexpr = gl.SliceLayout(1, SQUARE)
    BY_J: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    VALUE_ROW: gl.constexpr = HV * V
    LATE: gl.constexpr = w is not None
    GROUP: gl.constexpr = HEADS_W if LATE else HV // H
    STAGES: gl.constexpr = 1 if LATE else 2
    _, segment, head = program_place(segments, HV, 1)
    first, tokens, m, sequence, earlier, _ = place_segment(segments, cu_seqlens, segment, time, length)
    if (tokens == 0) & (earlier != 0):
        return
    S = end_of_segment(
        begin, added, transition, norms, cu_seqlens, segment, sequence, head, 0, time, length,
        HV, K, V, V, TYPE, DELTA, LASTING, STARTED, NORMS,
    )  # fmt: skip
    chunks = (tokens + 63) // 64
    TALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], TYPE)
    ws = gl.allocate_shared_memory(TYPE, [2, 64, K], TALL)
    dos = gl.allocate_shared_memory(TYPE, [2, 64, V], TALL)
    Ps = gl.allocate_shared_memory(TYPE, [2, 64, 64], TILE)
    fs = gl.allocate_shared_memory(gl.float32, [STAGES, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    one_q = gl.allocate_shared_memory(TYPE, [1, 64, K], TALL)
    one_u = gl.allocate_shared_memory(TYPE, [1, 64, V], TALL)
    one_z = gl.allocate_shared_memory(TYPE, [1, 64, V], TALL)
    one_h = gl.allocate_shared_memory(TYPE, [1, K, V], TALL)
    one_dS = gl.allocate_shared_memory(TYPE, [1, K, V], TALL)  # [keys, values]; then v, and of 128 channels dq
    Ts, one_A, one_k = Ps, Ps, ws
    if DELTA:
        Ts = gl.allocate_shared_memory(TYPE, [STAGES, 64, 64], TILE)
        one_A = gl.allocate_shared_memory(TYPE, [1, 64, 64], TILE)
    if LATE:
        one_k = gl.allocate_shared_memory(TYPE, [1, 64, K], TALL)
    sums = gl.allocate_shared_memory(gl.float32, [3, 16 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    met = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    # Copies are begun in this order: [w, dO, P, T and factors of n], which step n takes first, [u and h of n], [q of n; if LATE
    # k, T and factors], which it takes next, [w .. of n + 1]. In the middle of step n follow [v of n] and [u and h of n + 1].
    writes = k
    if w is not None:
        writes = w
    c = chunks - 1
    left = gl.where(chunks > 0, tokens - c * 64, 0)
    copy_early(
        writes, do, made, ws.index(0), dos.index(0), Ps.index(0), Ts.index(0), fs.index(0), first, m, head, c, left,
        HV, GROUP, K, V, RECORD, DELTA, LATE,
    )  # fmt: skip
    copy_states(u, h, one_u.index(0), one_h.index(0), first, m, head, c, left, HV, K, V)
    copy_late(
        q, k, made, one_q.index(0), one_k.index(0), Ts.index(0), fs.index(0), first, m, head, c, left, H, HV, K, RECORD, LATE
    )  # fmt: skip
    left = gl.where(chunks > 1, 64, 0)
    copy_early(
        writes, do, made, ws.index(1), dos.index(1), Ps.index(1), Ts.index(STAGES - 1), fs.index(STAGES - 1), first, m, head,
        c - 1, left, HV, GROUP, K, V, RECORD, DELTA, LATE,
    )  # fmt: skip
    zeros = gl.zeros([V, 64], gl.float32, TOKENS)
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    nothing = gl.zeros([64, K], gl.float32, WIDE)
    mold = own_sums(nothing, nothing)
    OWN: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, mold.type.layout))
    SUMS: gl.constexpr = row_sums(mold).type.layout
    for n in range(chunks):
        c = chunks - 1 - n
        live = gl.where(n == 0, tokens - (chunks - 1) * 64, 64)
        now = n & 1
        zero = unknown_zero()
        once = zero if LATE else now
        write, grads, pairs = ws.index(now), dos.index(now), Ps.index(now)
        square, line, key = Ts.index(once), fs.index(once), one_k.index(once)
        qs, us, zs, hs = one_q.index(zero), one_u.index(zero), one_z.index(zero), one_h.index(zero)
        dSs, plain_A = one_dS.index(zero), one_A.index(zero)
        vs = dSs.slice(0, 64)
        staged = vs
        if K == 128:
            staged = dSs.slice(64, 64)
        elif DELTA:
            staged = plain_A
        async_copy.wait_group(3)
        kept = S.to(TYPE)
        low = gl.convert_layout(kept, LEFT_S)
        du = warpgroup_mma(low, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
        plain = gl.convert_layout(grads.permute((1, 0)).load(TOKENS), LEFT)
        given = warpgroup_mma(plain, pairs, zeros, use_acc=False, is_async=True)
        dSs.permute((1, 0)).store(kept)
        async_copy.wait_group(1)
        gl.thread_barrier()
        until = line.slice(64, 64).load(BY_TOKEN)
        since = line.slice(0, 64).load(BY_TOKEN)
        total = line.slice(63, 1).load(gl.SliceLayout(0, KEYS))
        S *= total[None, :]
        if DECAY:
            sums.index(0).store(gl.sum(S * hs.permute((1, 0)).load(KEYS).to(gl.float32), 1))
        read = grads.permute((1, 0)).load(TOKENS).to(gl.float32)
        read = gl.convert_layout((read * (since * scale)[None, :]).to(TYPE), LEFT_S)
        S = warpgroup_mma(read, qs, S, is_async=True)
        du, low, given, plain = warpgroup_mma_wait(1, deps=[du, low, given, plain])
        found = du * until[None, :] + given
        if DELTA:
            du = gl.convert_layout(found.to(TYPE), LEFT)
            found = warpgroup_mma(du, square, zeros, use_acc=False, is_async=True)
            weight = line.slice(128, 64).load(BY_TOKEN) * since
            S, read, found, du = warpgroup_mma_wait(0, deps=[S, read, found, du])
            back = gl.convert_layout((-weight[None, :] * found).to(TYPE), LEFT_S)
            S = warpgroup_mma(back, key, S, is_async=True)
        zs.permute((1, 0)).store(found.to(TYPE))
        # A barrier follows every fence. Without one the assembler may read what is loaded next before it is there: it waits for
        # the fence by the same scoreboard.
        fence_async_shared()
        gl.thread_barrier()
        if DELTA:
            grad_A = warpgroup_mma(zs, us.permute((1, 0)), none, use_acc=False, is_async=True)
        grad_P = warpgroup_mma(grads, us.permute((1, 0)), none, use_acc=False, is_async=True)
        grad_w = warpgroup_mma(us, dSs.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if DELTA:
            grad_k = warpgroup_mma(zs, hs.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if DELTA:
            S, back, grad_A, grad_P = warpgroup_mma_wait(2, deps=[S, back, grad_A, grad_P])
        else:
            S, read, grad_P = warpgroup_mma_wait(1, deps=[S, read, grad_P])
        i = gl.arange(0, 64, BY_I)
        j = gl.arange(0, 64, BY_J)
        grad_P *= scale
        if DECAY:
            gap = line.slice(192, 64).load(BY_I)[:, None] - line.slice(192, 64).load(BY_J)[None, :]
            pair = gl.exp2(gl.where(i[:, None] >= j[None, :], gap, 0.0))
            grad_P *= pair
        grad_P = gl.where(i[:, None] >= j[None, :], grad_P, 0.0)
        pairs.store(grad_P.to(TYPE))
        if DELTA:
            if DECAY:
                grad_A *= pair
            grad_A = gl.where(i[:, None] > j[None, :], -grad_A, 0.0)
            plain_A.store(grad_A.to(TYPE))
            square.store((grad_A * line.slice(128, 64).load(BY_I)[:, None]).to(TYPE))
        fence_async_shared()
        gl.thread_barrier()
        grad_q = warpgroup_mma(grads, hs.permute((1, 0)), nothing, use_acc=False, is_async=True)
        # Each sum goes on as soon as it is there, so that products follow products.
        from_start = line.slice(0, 64).load(BY_ROW)
        grad_w = warpgroup_mma_wait(2 if DELTA else 1, deps=[grad_w])
        grad_w *= line.slice(64, 64).load(BY_ROW)[:, None]
        if DECAY:
            last = own_sums(grad_w, ws.index(anew(now)).load(WIDE))
            sums.index(0).store(sums.index(0).load(SUMS) + row_sums(last))
        grad_w = warpgroup_mma(pairs.permute((1, 0)), qs, grad_w, is_async=True)
        if DELTA:
            grad_w = warpgroup_mma(square.permute((1, 0)), key, grad_w, is_async=True)
            grad_k = warpgroup_mma_wait(3, deps=[grad_k])
            grad_k *= -from_start[:, None]
            grad_k = warpgroup_mma(plain_A, write, grad_k, is_async=True)
        grad_q = warpgroup_mma_wait(3 if DELTA else 1, deps=[grad_q])
        grad_q *= (from_start * scale)[:, None]
        grad_q = warpgroup_mma(pairs, write, grad_q, is_async=True)
        gl.thread_barrier()

        # u, h and dS are read by none any more
        if DELTA:
            copy_rows(vs, v + ((anew(first) + anew(c) * 64) * HV + anew(head)) * V, live, VALUE_ROW, True)
        async_copy.commit_group()
        more = gl.where(n + 1 < chunks, 64, 0)
        copy_states(u, h, us, hs, first, m, head, c - 1, more, HV, K, V)
        grad_w = warpgroup_mma_wait(2 if DELTA else 1, deps=[grad_w])
        if DECAY:
            summed = -own_sums(grad_w, ws.index(anew(now)).load(WIDE))
        if DELTA:
            grad_k = warpgroup_mma_wait(1, deps=[grad_k])
            overlap = own_sums(grad_k, one_k.index(anew(once)).load(WIDE))
            sums.index(1).store(row_sums(overlap))
            grad_k *= line.slice(128, 64).load(BY_ROW)[:, None]
            if w is None:
                grad_k += grad_w
        else:
            grad_k = grad_w
        grads.store(grad_k.to(TYPE))
        if w is not None:
            grad_w = grad_w.to(TYPE)
        grad_q = warpgroup_mma_wait(0, deps=[grad_q])
        staged.store(grad_q.to(TYPE))
        if DECAY:
            summed += own_sums(grad_q, qs.load(WIDE))
            if DELTA:
                summed += overlap * line.slice(128, 64).load(OWN)[:, None, None]
            sums.index(2).store(row_sums(summed))
        gl.thread_barrier()
        row, at = row_places(HV * K, 64, K)
        token = (anew(first) + anew(c) * 64) * HV + anew(head)
        gl.store(dq + token * K + at, staged.load(at.type.layout), (row < live)[:, None])
        gl.store(dk + token * K + at, grads.load(at.type.layout), (row < live)[:, None])
        if w is not None:
            write.store(grad_w)
        async_copy.wait_group(1)
        row, at = row_places(VALUE_ROW, 64, V)
        z = zs.load(at.type.layout)
        if DELTA:
            z = z.to(gl.float32)
            met.store(gl.sum(z * vs.load(at.type.layout).to(gl.float32), 1))
            z = (z * line.slice(128, 64).load(gl.SliceLayout(1, at.type.layout))[:, None]).to(TYPE)
        gl.store(dv + token * V + at, z, (row < live)[:, None])
        gl.thread_barrier()
        t = gl.arange(0, 64, LINE)
        at_gate = gate_grads + token + t * HV
        if DELTA:
            gl.store(at_gate, met.load(LINE) + load_sums(sums.index(1), LINE), t < live)
        if DECAY:
            summed = gl.associative_scan(load_sums(sums.index(2), LINE), 0, add, reverse=True)
            summed += gl.sum(load_sums(sums.index(0), LINE), 0)
            gl.store(at_gate + stride, summed, t < live)
        if w is not None:
            row, at = row_places(HV * K, 64, K)
            gl.store(dw + token * K + at, write.load(at.type.layout), (row < live)[:, None])
            gl.thread_barrier()
        copy_late(q, k, made, qs, key, square, line, first, m, head, c - 1, more, H, HV, K, RECORD, LATE)
        left = gl.where(n + 2 < chunks, 64, 0)
        copy_early(
            writes, do, made, write, grads, pairs, square, line, first, m, head, c - 2, left,
            HV, GROUP, K, V, RECORD, DELTA, LATE,
        )  # fmt: skip
    async_copy.wait_group(0)
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if earlier == 0:
            gl.store(state_addresses(dS, sequence * HV + head, 0, K, V, V), S)
