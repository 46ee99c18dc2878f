"""The pass over the chunks of a segment, in Gluon for Hopper GPUs: see the head of this folder."""

from __future__ import annotations

from ...common.hopper_tiles import copy_rows, product_layout, row_places, uniform, unknown_zero
from ...common.math import infinite_to_nan
from ...runtime.gluon import async_copy, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .records import copy_factors, growth_of
from .segments import (
    count_needed,
    find_segment,
    has_large_number,
    largest_row_sum,
    program_place,
    start_of_segment,
    state_addresses,
)


@gluon.jit
def store_rows(staged, x, at, live, STRIDE: gl.constexpr):
    """Write x [columns, rows] as a tile [rows, columns] by way of shared memory, its rows before `live`."""
    row, places = row_places(STRIDE, staged.shape[0], staged.shape[1])
    staged.permute((1, 0)).store(x)
    gl.store(at + places, staged.load(places.type.layout), (row < live)[:, None])


@gluon.jit
def first_bad(x):
    """By row [columns, 64], the first token that is a NaN or an infinity, 64 where none is."""
    i = gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))
    bad = ~(gl.abs(x) < float("inf"))
    return bad, gl.min(gl.where(bad, i[None, :], 64), 1)


@gluon.jit
def spoil(x, first):
    """NaN from the first bad token on."""
    i = gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))
    return gl.where(i[None, :] >= first[:, None], float("nan"), x)


@gluon.jit
def shared_buffers(
    TYPE: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, READ: gl.constexpr, WRITE: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BV], TYPE)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], TYPE)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ks = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], WIDE)
    vs = gl.allocate_shared_memory(TYPE, [STAGES, 64, BV], TILE)
    Ts = vs
    if DELTA:
        Ts = gl.allocate_shared_memory(TYPE, [STAGES, 64, 64], SQUARE)
    fs = gl.allocate_shared_memory(gl.float32, [STAGES, 128], LINE)
    if READ:
        qs = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], WIDE)
        Ps = gl.allocate_shared_memory(TYPE, [STAGES, 64, 64], SQUARE)
        staged = gl.allocate_shared_memory(TYPE, [64, BV], TILE)
    else:
        qs, Ps, staged = ks, vs, vs
    ws = ks
    if WRITE:
        ws = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], WIDE)
    return ks, ws, qs, vs, Ts, Ps, fs, staged


@gluon.jit
def pass_segment(
    S, q, k, w, v, made, solved, o, kept, tokens, scale, has_values,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RECORD: gl.constexpr,
    DELTA: gl.constexpr, DECAY: gl.constexpr, READ: gl.constexpr, STAGES: gl.constexpr, CAREFUL: gl.constexpr,
):  # fmt: skip
    """S after the tokens, and their whole decay; with READ the outputs are written, and u into `kept` unless that is None. w:
    write keys, None where k writes. Without DELTA, for linear attention, u is v. CAREFUL: a NaN or an infinity spoils nothing
    before it."""
    BV: gl.constexpr = S.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    TYPE: gl.constexpr = k.dtype.element_ty
    ks, ws, qs, vs, Ts, Ps, fs, staged = shared_buffers(TYPE, K, BV, STAGES, READ, w is not None, DELTA)
    TOKENS: gl.constexpr = product_layout(WARPS, 64)
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, S.type.layout, 2)
    KEY_ROW: gl.constexpr = H * K
    WRITE_ROW: gl.constexpr = HV // HEADS_W * K
    VALUE_ROW: gl.constexpr = HV * V
    EARLY: gl.constexpr = w is not None
    o -= 64 * VALUE_ROW
    chunks = (tokens + 63) // 64

    for ahead in gl.static_range(STAGES - 1):
        live = tokens - ahead * 64
        if live > 0:
            copy_rows(ks.index(ahead), k, live, KEY_ROW, True)
            if w is not None:
                copy_rows(ws.index(ahead), w, live, WRITE_ROW, True)
            copy_rows(vs.index(ahead), v, gl.where(has_values, live, 0), VALUE_ROW, True)
            if DELTA:
                copy_rows(Ts.index(ahead), solved, live, 64, False)
            if READ:
                copy_rows(qs.index(ahead), q, live, KEY_ROW, True)
                copy_rows(Ps.index(ahead), made, live, 64, False)
            if DECAY:
                copy_factors(fs.index(ahead), made, True)
        async_copy.commit_group()
        k += 64 * KEY_ROW
        if w is not None:
            w += 64 * WRITE_ROW
        q += 64 * KEY_ROW
        v += 64 * VALUE_ROW
        made += HV * RECORD
        if DELTA:
            solved += HV * 4096

    zeros = gl.zeros([BV, 64], gl.float32, TOKENS)
    low = gl.convert_layout(S.to(TYPE), LEFT_S)
    out = zeros
    through = gl.full([K], 1.0, gl.float32, gl.SliceLayout(0, S.type.layout))
    ruin = gl.full([BV], 64, gl.int32, gl.SliceLayout(1, TOKENS))
    now = 0
    into = STAGES - 1
    for n in range(chunks):
        async_copy.wait_group(STAGES - 2)
        if READ:
            if CAREFUL:
                out = spoil(infinite_to_nan(out), ruin)
            done = out.to(TYPE)
        if DECAY == 2:
            S *= fs.index(now).slice(0, K).load(gl.SliceLayout(0, S.type.layout))[None, :]
            low = gl.convert_layout(S.to(TYPE), LEFT_S)
        if DELTA:
            read = warpgroup_mma(low, ks.index(now).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if READ:
            out = warpgroup_mma(low, qs.index(now).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Copies are spread over the step: begun all at once, they would hold up what comes next. A buffer is copied to where a
        # barrier costs nothing between that and what is read of it. With write keys a step waits for what the one before copied,
        # so all begin early.
        live = tokens - (n + STAGES - 1) * 64
        whole = gl.where(live > 0, 64, 0)
        if READ:
            store_rows(staged, done, o, gl.where(n > 0, 64, 0), VALUE_ROW)
            o += 64 * VALUE_ROW
            copy_rows(qs.index(into), q, live, KEY_ROW, True)
        if EARLY:
            copy_rows(ks.index(into), k, live, KEY_ROW, True)
            copy_rows(ws.index(into), w, live, WRITE_ROW, True)
            if READ:
                copy_rows(Ps.index(into), made, whole, 64, True)
        values = vs.index(now).permute((1, 0)).load(TOKENS)
        if DECAY == 1:
            factors = fs.index(now)
            since = factors.slice(0, 64).load(BY_TOKEN)
            until = factors.slice(64, 64).load(BY_TOKEN)
            total = factors.slice(63, 1).load(gl.SliceLayout(0, S.type.layout))
        x = values.to(gl.float32)
        if DELTA:
            read = warpgroup_mma_wait(1 if READ else 0, deps=[read])
            if DECAY == 1:
                read *= since[None, :]
            x -= read
        if CAREFUL:
            bad, ruin = first_bad(x)
            x = gl.where(bad, 0.0, x)
        if DELTA:
            x = gl.convert_layout(x.to(TYPE), LEFT)
            u = warpgroup_mma(x, Ts.index(now).permute((1, 0)), zeros, use_acc=False, is_async=True)
            copy_rows(Ts.index(into), solved, whole, 64, True)
        copy_rows(vs.index(into), v, gl.where(has_values, live, 0), VALUE_ROW, True)
        if DECAY:
            copy_factors(fs.index(into), made, live > 0)
        if DECAY == 1:
            S *= total[None, :]
            if not (READ or DELTA):
                through *= total
        if READ:
            out, low = warpgroup_mma_wait(1 if DELTA else 0, deps=[out, low])
        if DELTA:
            u, x = warpgroup_mma_wait(0, deps=[u, x])
        else:
            u = x
        if CAREFUL:
            u = spoil(u, ruin)
        decayed = u
        if DECAY == 1:
            decayed *= until[None, :]
        decayed = gl.convert_layout(decayed.to(TYPE), LEFT_S)
        S = warpgroup_mma(decayed, ws.index(now), S, is_async=True)
        if READ:
            if DECAY == 1:
                out *= (since * scale)[None, :]
            elif DECAY == 0:
                out *= scale
            if CAREFUL:
                bad, ruin = first_bad(u)
                u = gl.where(bad, 0.0, u)
            written = gl.convert_layout(u.to(TYPE), LEFT)
            out = warpgroup_mma(written, Ps.index(now).permute((1, 0)), out, is_async=True)
            if kept is not None:
                if CAREFUL:
                    u = spoil(u, ruin)
                store_rows(staged, u.to(TYPE), kept, tokens - n * 64, VALUE_ROW)
                kept += 64 * VALUE_ROW
        if not EARLY:
            copy_rows(ks.index(into), k, live, KEY_ROW, True)
            if READ:
                copy_rows(Ps.index(into), made, whole, 64, True)
        async_copy.commit_group()
        q += 64 * KEY_ROW
        k += 64 * KEY_ROW
        if w is not None:
            w += 64 * WRITE_ROW
        v += 64 * VALUE_ROW
        made += HV * RECORD
        if DELTA:
            solved += HV * 4096
        S, decayed = warpgroup_mma_wait(1 if READ else 0, deps=[S, decayed])
        if DECAY == 2:
            S *= fs.index(now).slice(0, K).load(gl.SliceLayout(0, S.type.layout))[None, :]
        else:
            low = gl.convert_layout(S.to(TYPE), LEFT_S)
        if READ:
            out, written = warpgroup_mma_wait(0, deps=[out, written])
        now = gl.where(now == STAGES - 1, 0, now + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    async_copy.wait_group(0)
    if READ:
        if CAREFUL:
            out = spoil(infinite_to_nan(out), ruin)
        store_rows(staged, out.to(TYPE), o, gl.where(chunks > 0, tokens - (chunks - 1) * 64, 0), VALUE_ROW)
    return S, through


@gluon.jit(do_not_specialize=["time", "length"])
def read_chunks(
    q, k, w, v, made, solved, begin, added, transition, norms, o, end, u, starts, segments, cu_seqlens, time, length, scale,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    RECORD: gl.constexpr, DELTA: gl.constexpr, LASTING: gl.constexpr, DECAY: gl.constexpr, STARTED: gl.constexpr,
    ENDED: gl.constexpr, NORMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The outputs of a segment. begin, end: the state before and after every sequence [N, HV, K, V]; added, transition and norms:
    what `summarize_chunks` left of the segments, of `length` tokens, None where there is one. For a backward u [BT, HV, V] and
    the states that the segments start from [P, HV, K, V] are written too, None otherwise."""
    TYPE: gl.constexpr = q.dtype.element_ty
    PARTS: gl.constexpr = V // BV
    part, segment, head = program_place(segments, HV, PARTS)
    first, tokens, m, sequence, earlier, is_last = find_segment(segments, segment, time, length)
    if (tokens == 0) & (~is_last):
        return
    at_key = (first * H + head // (HV // H)) * K
    at_value = (first * HV + head) * V + part * BV
    made += (m * HV + head) * RECORD
    if DELTA:
        solved += (m * HV + head) * 4096
    S = start_of_segment(
        begin, added, transition, norms, cu_seqlens, segment, sequence, earlier, head, part, time, length,
        HV, K, V, BV, TYPE, DELTA, LASTING, STARTED, NORMS,
    )  # fmt: skip
    if w is not None:
        w += (first * (HV // HEADS_W) + head // HEADS_W) * K
    if u is not None:
        u += at_value
    if starts is not None:
        gl.store(state_addresses(starts, segment * HV + head, part, K, V, BV), S)
    S, _ = pass_segment(
        S, q + at_key, k + at_key, w, v + at_value, made, solved, o + at_value, u, tokens, scale, True,
        H, HV, HEADS_W, K, V, RECORD, DELTA, DECAY, True, STAGES, False,
    )  # fmt: skip
    lost = gl.sum(gl.sum(S * 0.0, 1), 0)
    if lost != lost:  # a NaN or an infinity, which a state keeps: outputs before it were spoiled by products with 0
        S = start_of_segment(
            begin, added, transition, norms, cu_seqlens, segment, sequence, earlier, head, part, time, length,
            HV, K, V, BV, TYPE, DELTA, LASTING, STARTED, NORMS,
        )  # fmt: skip
        S, _ = pass_segment(
            S, q + at_key, k + at_key, w, v + at_value, made, solved, o + at_value, u, tokens, scale, True,
            H, HV, HEADS_W, K, V, RECORD, DELTA, DECAY, True, STAGES, True,
        )  # fmt: skip
        S = infinite_to_nan(S)
    if ENDED:  # noqa: SIM102 (one is known when compiling)
        if is_last:
            gl.store(state_addresses(end, sequence * HV + head, part, K, V, BV), S)


@gluon.jit(do_not_specialize=["time", "length"])
def summarize_chunks(
    k, w, v, made, solved, added, transition, norms, segments, cu_seqlens, time, length,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    RECORD: gl.constexpr, DELTA: gl.constexpr, LASTING: gl.constexpr, DECAY: gl.constexpr, STAGES: gl.constexpr,
    LAST: gl.constexpr, STARTED: gl.constexpr,
):  # fmt: skip
    """What a segment does to a state, S -> T S + R: R, transposed, into `added` [P, HV, V, K], T into `transition`
    [P, HV, K, K], LASTING as the sum of two such matrices, or without DELTA, where it is one decay, [P, HV]; norms
    [P, HV, parts]: see `segments_needed`. Of the last segment of a sequence nobody reads R, and T only with LAST, in a
    backward from states. T of the first only takes the first state on, with STARTED."""
    KEYS: gl.constexpr = product_layout(gl.num_warps(), K)
    VALUES: gl.constexpr = V // BV
    PARTS: gl.constexpr = VALUES + (K // BV if DELTA else 0)
    part, segment, head = program_place(segments, HV, PARTS)
    first, tokens, m, _, earlier, is_last = find_segment(segments, segment, time, length)
    number = segment.to(gl.int64) * HV + head
    is_value = part + unknown_zero() < VALUES  # where it is known, Triton 3.6 may not compile the kernel
    if (tokens == 0) & (~is_last):
        return
    if is_last & ((is_value & DELTA) | (not LAST)):
        return
    if (earlier == 0) & ~is_value & (DELTA and not STARTED):
        if norms is not None:
            gl.store(norms + number * PARTS + part, 0.0)
        return
    column = gl.where(is_value, part, part - VALUES) * BV
    at_key = (first * H + head // (HV // H)) * K
    at_value = (first * HV + head) * V + gl.where(is_value, column, 0)
    c = column + gl.arange(0, BV, gl.SliceLayout(1, KEYS))
    d = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    S = gl.where((c[:, None] == d[None, :]) & (part >= VALUES), 1.0, 0.0)
    made += (m * HV + head) * RECORD
    if DELTA:
        solved += (m * HV + head) * 4096
    if w is not None:
        w += (first * (HV // HEADS_W) + head // HEADS_W) * K
    v += at_value
    k += at_key
    if norms is not None and w is None and DECAY == 1:
        # Chunks at the segment's start are left out, as segments are, where nothing comes through those behind them.
        chunks = (tokens + 63) // 64
        last = made + (chunks - 1).to(gl.int64) * (HV * RECORD)
        left_out = chunks - count_needed(growth_of(last), 0, -(HV * RECORD // 2), chunks, 1)
        large = has_large_number(v, gl.where(is_value, left_out * 64, 0), HV * V, BV)
        if not DELTA:  # else a bad key makes growths NaN
            large |= has_large_number(k, left_out * 64, H * K, K)
        left_out = uniform(gl.where(large, 0, left_out))
        tokens -= left_out * 64
        k += left_out.to(gl.int64) * (64 * H * K)
        v += left_out.to(gl.int64) * (64 * HV * V)
        made += left_out.to(gl.int64) * (HV * RECORD)
        if DELTA:
            solved += left_out.to(gl.int64) * (HV * 4096)
    S, through = pass_segment(
        S, k, k, w, v, made, solved, v, None, tokens, 1.0, is_value,
        H, HV, HEADS_W, K, V, RECORD, DELTA, DECAY, False, STAGES, False,
    )  # fmt: skip
    norm = 0.0
    if norms is not None:
        norm = largest_row_sum(S)
    if is_value:
        gl.store(added + number * (K * V) + c[:, None] * K + d[None, :], S)
        norm *= 0.0
        if not DELTA:  # noqa: SIM102 (one is known when compiling)
            if part == 0:
                decay = gl.max(through, 0)
                gl.store(transition + number, decay)
                norm += decay
    elif DELTA:
        at_transition = transition + number * ((2 if LASTING else 1) * K * K) + d[None, :] * K + c[:, None]
        rounded = S.to(transition.dtype.element_ty)
        gl.store(at_transition, rounded)
        if LASTING:
            gl.store(at_transition + K * K, (S - rounded.to(gl.float32)).to(rounded.dtype))
    if norms is not None:
        gl.store(norms + number * PARTS + part, norm)
