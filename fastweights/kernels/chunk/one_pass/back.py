"""What a backward does before its last pass, in Gluon for Hopper GPUs: the states of all chunks again, and what segments do to
their gradients; see the head of this folder."""

from __future__ import annotations

from ...common.hopper_tiles import copy_rows, product_layout, row_places, uniform
from ...common.packing import pieces_of_sequence
from ...runtime.gluon import async_copy, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .passes import store_rows
from .records import T_PLACE, copy_factors, growth_of
from .segments import (
    count_needed,
    find_segment,
    has_large_number,
    largest_row_sum,
    load_state,
    program_place,
    segments_needed,
    through_segments,
)


@gluon.jit(do_not_specialize=["time", "length"])
def states_again(
    w, u, made, start, h, segments, cu_seqlens, time, length,
    HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, RECORD: gl.constexpr,
    CHANNEL: gl.constexpr, STARTED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The states at the chunks' starts h [M, HV, K, V], from write keys w, u [BT, HV, V] and the states [P, HV, K, V] that
    segments start from. made: see `solve_chunks`."""
    WARPS: gl.constexpr = gl.num_warps()
    TYPE: gl.constexpr = w.dtype.element_ty
    KEYS: gl.constexpr = product_layout(WARPS, K)
    TOKENS: gl.constexpr = product_layout(WARPS, 64)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    WRITE_ROW: gl.constexpr = HV // HEADS_W * K
    VALUE_ROW: gl.constexpr = HV * V
    PARTS: gl.constexpr = V // BV
    part, segment, head = program_place(segments, HV, PARTS)
    first, tokens, m, _, _, _ = find_segment(segments, segment, time, length)
    w += (first * (HV // HEADS_W) + head // HEADS_W) * K
    u += (first * HV + head) * V + part * BV
    h += (m * HV + head) * (K * V) + part * BV
    made += (m * HV + head) * RECORD
    S = load_state(start, segment * HV + head, part, K, V, BV, STARTED)
    ws = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], gl.NVMMASharedLayout.get_default_for([64, K], TYPE))
    us = gl.allocate_shared_memory(TYPE, [STAGES, 64, BV], gl.NVMMASharedLayout.get_default_for([64, BV], TYPE))
    fs = gl.allocate_shared_memory(gl.float32, [STAGES, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    staged = gl.allocate_shared_memory(TYPE, [K, BV], gl.NVMMASharedLayout.get_default_for([K, BV], TYPE))
    chunks = (tokens + 63) // 64
    for ahead in gl.static_range(STAGES - 1):
        live = tokens - ahead * 64
        copy_rows(ws.index(ahead), w, live, WRITE_ROW, True)
        copy_rows(us.index(ahead), u, live, VALUE_ROW, True)
        copy_factors(fs.index(ahead), made, live > 0)
        async_copy.commit_group()
        w += 64 * WRITE_ROW
        u += 64 * VALUE_ROW
        made += HV * RECORD
    now = 0
    into = STAGES - 1
    for n in range(chunks):
        async_copy.wait_group(STAGES - 2)
        written = us.index(now).permute((1, 0)).load(TOKENS)
        if CHANNEL:
            total = fs.index(now).slice(0, K).load(gl.SliceLayout(0, KEYS))
        else:
            until = fs.index(now).slice(64, 64).load(gl.SliceLayout(0, TOKENS))
            total = fs.index(now).slice(63, 1).load(gl.SliceLayout(0, KEYS))
            written = (written.to(gl.float32) * until[None, :]).to(TYPE)
        if CHANNEL:
            S *= total[None, :]
            low = S.to(TYPE)
        else:
            low = S.to(TYPE)
            S *= total[None, :]
        written = gl.convert_layout(written, LEFT)
        S = warpgroup_mma(written, ws.index(now), S, is_async=True)
        store_rows(staged, low, h, K, V)
        live = tokens - (n + STAGES - 1) * 64
        copy_rows(ws.index(into), w, live, WRITE_ROW, True)
        copy_rows(us.index(into), u, live, VALUE_ROW, True)
        copy_factors(fs.index(into), made, live > 0)
        async_copy.commit_group()
        h += HV * K * V
        w += 64 * WRITE_ROW
        u += 64 * VALUE_ROW
        made += HV * RECORD
        S, written = warpgroup_mma_wait(0, deps=[S, written])
        if CHANNEL:
            S *= fs.index(now).slice(0, K).load(gl.SliceLayout(0, KEYS))[None, :]
        now = gl.where(now == STAGES - 1, 0, now + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    async_copy.wait_group(0)


@gluon.jit
def place_segment(segments, cu_seqlens, segment, time, length):
    """Of a segment: its first token, how many tokens it has, its first chunk, its sequence, how many segments that has before it,
    of packed sequences too, and whether it is the last."""
    first, tokens, m, sequence, earlier, is_last = find_segment(segments, segment, time, length)
    if segments is not None:
        number, _ = pieces_of_sequence(cu_seqlens, sequence, time, length, 1)
        earlier = segment - number
    return first, tokens, m, sequence, earlier, is_last


@gluon.jit
def end_of_segment(
    begin, added, transition, norms, cu_seqlens, segment, sequence, head, part, time, length,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, TYPE: gl.constexpr, DELTA: gl.constexpr,
    LASTING: gl.constexpr, STARTED: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """The gradient [columns, keys] of the state after a segment: of that after its sequence, taken back through the segments
    behind it, see `segments_needed`."""
    S = load_state(begin, sequence * HV + head, part, K, V, BV, STARTED)
    if added is not None:
        number, count = pieces_of_sequence(cu_seqlens, sequence, time, length, 1)
        later = number + count - 1 - segment
        needed = later
        if norms is not None:
            needed = segments_needed(norms, (segment + 1) * HV + head, HV, later, NORMS)
            S = gl.where(needed < later, 0.0 * S, S)
        at = (segment + needed).to(gl.int64) * HV + head
        S = through_segments(S, added, transition, at, -HV, needed, part, K, V, TYPE, DELTA, LASTING, True, STARTED)
    return S


@gluon.jit
def copy_back(
    ks, ws, Ps, Ts, qs, dos, fs, at, k, w, made, q, do, left,
    KEY_ROW: gl.constexpr, WRITE_ROW: gl.constexpr, VALUE_ROW: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Begin to copy what `summarize_back` takes of a chunk of `left` tokens, none before the first chunk."""
    if DELTA:
        whole = gl.where(left > 0, 64, 0)
        copy_rows(ks.index(at), k, left, KEY_ROW, True)
        copy_rows(Ps.index(at), made, whole, 64, True)
        copy_rows(Ts.index(at), made + T_PLACE, whole, 64, True)
        if w is not None:
            copy_rows(ws.index(at), w, left, WRITE_ROW, True)
    copy_rows(qs.index(at), q, left, KEY_ROW, True)
    copy_rows(dos.index(at), do, left, VALUE_ROW, True)
    copy_factors(fs.index(at), made, left > 0)
    async_copy.commit_group()


@gluon.jit
def chunk_before(q, k, made, do, RECORDS: gl.constexpr, KEY_ROW: gl.constexpr, VALUE_ROW: gl.constexpr):
    """Where the operands of the chunk before lie; w, which may be None, the caller moves. RECORDS: numbers from record to
    record."""
    return q - 64 * KEY_ROW, k - 64 * KEY_ROW, made - RECORDS, do - 64 * VALUE_ROW


@gluon.jit(do_not_specialize=["time", "length"])
def summarize_back(
    q, k, w, made, do, transition, added, norms, segments, cu_seqlens, time, length, scale,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    RECORD: gl.constexpr, STAGES: gl.constexpr, DELTA: gl.constexpr, CHANNEL: gl.constexpr, STARTED: gl.constexpr,
):  # fmt: skip
    """What a segment adds to the gradient of the state before it, transposed, into `added` [P, HV, V, K]: from its last chunk to
    the first, where the gradient of the state behind it is 0. norms [P, HV, parts]: see `segments_needed`; without STARTED the
    transition of a last segment is not read. w: write keys, None where k writes. made: see `solve_chunks`; transition: see
    `summarize_chunks`."""
    WARPS: gl.constexpr = gl.num_warps()
    TYPE: gl.constexpr = k.dtype.element_ty
    KEYS: gl.constexpr = product_layout(WARPS, K)
    TOKENS: gl.constexpr = product_layout(WARPS, 64)
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    KEY_ROW: gl.constexpr = H * K
    WRITE_ROW: gl.constexpr = HV // HEADS_W * K
    VALUE_ROW: gl.constexpr = HV * V
    PARTS: gl.constexpr = V // BV
    part, segment, head = program_place(segments, HV, PARTS)
    first, tokens, m, sequence, earlier, is_last = place_segment(segments, cu_seqlens, segment, time, length)
    if (tokens == 0) | (earlier == 0):  # nobody reads what the first segment adds
        return
    S = gl.zeros([BV, K], gl.float32, KEYS)
    chunks = (tokens + 63) // 64
    if norms is not None and w is None and not CHANNEL:
        # Chunks at the segment's end are left out, as in `summarize_chunks`.
        growth = growth_of(made + (m * HV + head) * RECORD)
        needed = count_needed(growth, 0, HV * RECORD // 2, chunks, 1)
        behind = tokens - needed * 64
        at = first + needed.to(gl.int64) * 64
        large = has_large_number(do + (at * HV + head) * V + part * BV, behind, VALUE_ROW, BV)
        large |= has_large_number(q + (at * H + head // (HV // H)) * K, behind, KEY_ROW, K)
        tokens = uniform(gl.where(large, tokens, gl.minimum(tokens, needed * 64)))
        chunks = (tokens + 63) // 64
    t = first + (chunks - 1).to(gl.int64) * 64
    m += chunks - 1
    q += (t * H + head // (HV // H)) * K
    k += (t * H + head // (HV // H)) * K
    if w is not None:
        w += (t * (HV // HEADS_W) + head // HEADS_W) * K
    made += (m * HV + head) * RECORD
    do += (t * HV + head) * V + part * BV
    TALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], TYPE)
    qs = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], TALL)
    dos = gl.allocate_shared_memory(TYPE, [STAGES, 64, BV], gl.NVMMASharedLayout.get_default_for([64, BV], TYPE))
    fs = gl.allocate_shared_memory(gl.float32, [STAGES, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ks, ws, Ps, Ts = qs, qs, dos, dos
    if DELTA:
        ks = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], TALL)
        ws = ks
        Ps = gl.allocate_shared_memory(TYPE, [STAGES, 64, 64], SQUARE)
        Ts = gl.allocate_shared_memory(TYPE, [STAGES, 64, 64], SQUARE)
    if w is not None:
        ws = gl.allocate_shared_memory(TYPE, [STAGES, 64, K], TALL)
    left = tokens - (chunks - 1) * 64  # tokens of the chunk that is copied, 0 before the first
    for ahead in gl.static_range(STAGES - 1):
        copy_back(
            ks, ws, Ps, Ts, qs, dos, fs, ahead, k, w, made, q, do, left, KEY_ROW, WRITE_ROW, VALUE_ROW, DELTA
        )  # fmt: skip
        left = gl.where(chunks > ahead + 1, 64, 0)
        q, k, made, do = chunk_before(q, k, made, do, HV * RECORD, KEY_ROW, VALUE_ROW)
        if w is not None:
            w -= 64 * WRITE_ROW
    zeros = gl.zeros([BV, 64], gl.float32, TOKENS)
    now = 0
    into = STAGES - 1
    for n in range(chunks):
        async_copy.wait_group(STAGES - 2)
        line = fs.index(now)
        if CHANNEL:
            S *= line.slice(0, K).load(gl.SliceLayout(0, KEYS))[None, :]
        if DELTA:
            low = gl.convert_layout(S.to(TYPE), LEFT_S)
            du = warpgroup_mma(low, ws.index(now).permute((1, 0)), zeros, use_acc=False, is_async=True)
        grad = dos.index(now).permute((1, 0)).load(TOKENS)
        if not CHANNEL:
            since = line.slice(0, 64).load(BY_TOKEN)
            total = line.slice(63, 1).load(gl.SliceLayout(0, KEYS))
        if w is not None:  # as in `pass_segment`
            left = gl.where(n + STAGES - 1 < chunks, 64, 0)
            copy_back(
                ks, ws, Ps, Ts, qs, dos, fs, into, k, w, made, q, do, left, KEY_ROW, WRITE_ROW, VALUE_ROW, DELTA
            )  # fmt: skip
        if DELTA:
            plain = gl.convert_layout(grad, LEFT)
            given = warpgroup_mma(plain, Ps.index(now), zeros, use_acc=False, is_async=True)
            weight = line.slice(128, 64).load(BY_TOKEN)
            if not CHANNEL:
                until = line.slice(64, 64).load(BY_TOKEN)
                weight = since * weight
            du, low, given, plain = warpgroup_mma_wait(0, deps=[du, low, given, plain])
            if not CHANNEL:
                du *= until[None, :]
            du = gl.convert_layout((du + given).to(TYPE), LEFT)
            z = warpgroup_mma(du, Ts.index(now), zeros, use_acc=False, is_async=True)
        if not CHANNEL:
            S *= total[None, :]
        grad = grad.to(gl.float32) * (scale if CHANNEL else (since * scale)[None, :])
        grad = gl.convert_layout(grad.to(TYPE), LEFT_S)
        S = warpgroup_mma(grad, qs.index(now), S, is_async=True)
        if DELTA:
            z, du = warpgroup_mma_wait(1, deps=[z, du])
            back = gl.convert_layout((-weight[None, :] * z).to(TYPE), LEFT_S)
            S = warpgroup_mma(back, ks.index(now), S, is_async=True)
        if w is None:
            left = gl.where(n + STAGES - 1 < chunks, 64, 0)
            copy_back(
                ks, ws, Ps, Ts, qs, dos, fs, into, k, w, made, q, do, left, KEY_ROW, WRITE_ROW, VALUE_ROW, DELTA
            )  # fmt: skip
        q, k, made, do = chunk_before(q, k, made, do, HV * RECORD, KEY_ROW, VALUE_ROW)
        if w is not None:
            w -= 64 * WRITE_ROW
        if DELTA:
            S, grad, back = warpgroup_mma_wait(0, deps=[S, grad, back])
        else:
            S, grad = warpgroup_mma_wait(0, deps=[S, grad])
        if CHANNEL:
            S *= line.slice(0, K).load(gl.SliceLayout(0, KEYS))[None, :]
        now = gl.where(now == STAGES - 1, 0, now + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    async_copy.wait_group(0)
    c = part * BV + gl.arange(0, BV, gl.SliceLayout(1, KEYS))
    d = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    number = segment.to(gl.int64) * HV + head
    gl.store(added + number * (K * V) + c[:, None] * K + d[None, :], S)
    if norms is not None:
        norm = 0.0 * largest_row_sum(S)
        if (part == 0) & (~is_last | STARTED):
            if DELTA:
                _, places = row_places(K, K, K)
                norm += largest_row_sum(gl.load(transition + number * (K * K) + places).to(gl.float32))
            else:
                norm += gl.load(transition + number)
        gl.store(norms + number * PARTS + part, norm)
