"""Segments of sequences in Gluon: where they lie, and the state that comes into one from those before it. See the head of this
folder."""

from __future__ import annotations

from ...common.hopper_tiles import add, copy_rows, product_layout, row_places
from ...common.packing import pieces_of_sequence, segment_in_turn, segment_place
from ...runtime.gluon import async_copy, gl, gluon, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def program_place(segments, HV: gl.constexpr, PARTS: gl.constexpr):
    """The part, segment and head of a program of a grid (PARTS x P, HV). Of packed sequences, see `segment_in_turn`, a segment's
    programs of all heads follow each other."""
    if segments is None:
        part, segment, head = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS, gl.program_id(1)
    else:
        number = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        part, head = number % PARTS, number // PARTS % HV
        segment = segment_in_turn(segments, number // (PARTS * HV))
    return part, segment, head


@gluon.jit
def find_segment(segments, segment, time, length):
    """Of a segment: its first token (int64), how many tokens it has, its first chunk (int64), its sequence, how many segments the
    sequence has before it, of packed sequences whether there is one, and whether it is the last. segments: the table of packed
    sequences, None for rows."""
    if segments is None:
        per_row = gl.maximum((time + length - 1) // length, 1)
        sequence = segment // per_row
        earlier = segment - sequence * per_row
        before = earlier * length
        first = (sequence * time + before).to(gl.int64)
        tokens = gl.minimum(time - before, length)
        chunk = (sequence * ((time + 63) // 64) + before // 64).to(gl.int64)
        is_last = earlier == per_row - 1
    else:
        first, stop, chunk, sequence, is_first, is_last = segment_place(segments, segment, time)
        tokens = (stop - first).to(gl.int32)
        earlier = gl.where(is_first, 0, 1)
    return first, tokens, chunk, sequence, earlier, is_last


@gluon.jit
def state_addresses(states, number, part, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Where the numbers [columns, keys] of a program lie in a state of states [.., K, V]."""
    KEYS: gl.constexpr = product_layout(gl.num_warps(), K)
    c = part * BV + gl.arange(0, BV, gl.SliceLayout(1, KEYS))
    d = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    return states + number.to(gl.int64) * (K * V) + (d[None, :] * V + c[:, None])


@gluon.jit
def load_state(states, number, part, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STARTED: gl.constexpr):
    """The numbers [columns, keys] of a program in a state of states, in float32; zeros unless STARTED."""
    if STARTED:
        S = gl.load(state_addresses(states, number, part, K, V, BV)).to(gl.float32)
    else:
        S = gl.zeros([BV, K], gl.float32, product_layout(gl.num_warps(), K))
    return S


@gluon.jit
def largest_row_sum(x):
    """Of absolute numbers; NaN where one is a NaN or an infinity."""
    sums = gl.sum(gl.abs(x), 1)
    return gl.max(sums, 0) + gl.sum(0.0 * sums, 0)


@gluon.jit
def count_needed(norms, near, step, count, NORMS: gl.constexpr):
    """Of `count` segments between a state and the start of its sequence, or its gradient and the end, how many it is found from.
    What lies behind so many that less than 2^-126 comes through them, below float32's normal numbers, adds nothing. All, where
    one has a bad number or they are more than 128. Likewise of chunks.

    norms: how many times larger each makes the absolute sum of a row of a state at most, in NORMS parts. Those of the nearest lie
    at number `near`, of the next `step` further."""
    MOST: gl.constexpr = 128
    i = gl.arange(0, MOST, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    norms += (near + i.to(gl.int64) * step) * NORMS
    norm = 0.0
    for part in gl.static_range(NORMS):
        norm += gl.load(norms + part, i < count, 0.0)
    through = gl.associative_scan(gl.log2(gl.where(i < count, norm, 1.0)), 0, add)
    needed = gl.max(gl.where((i < count) & (through >= -126.0), i + 2, 1), 0)
    bad = gl.sum(0.0 * norm, 0)
    return gl.where((bad == bad) & (count <= MOST), gl.minimum(needed, count), count)


@gluon.jit(noinline=True)
def segments_needed(norms, near, step, count, NORMS: gl.constexpr):
    """`count_needed` apart, as within a pass it would cost the loop registers."""
    return count_needed(norms, near, step, count, NORMS)


@gluon.jit
def has_large_number(x, tokens, STRIDE: gl.constexpr, WIDTH: gl.constexpr):
    """Whether rows [tokens, WIDTH] have a NaN, an infinity, or a number so large that sums of them might become one."""
    ROWS: gl.constexpr = 16384 // WIDTH  # many loads at once
    row, at = row_places(STRIDE, ROWS, WIDTH)
    LAYOUT: gl.constexpr = at.type.layout
    large = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    for n in range((tokens + ROWS - 1) // ROWS):
        numbers = gl.load(x + at, (row < tokens - n * ROWS)[:, None], 0.0).to(gl.float32)
        large = gl.where(gl.abs(numbers) < 1e18, large, 1.0)
        x += ROWS * STRIDE
    return gl.max(gl.max(large, 1), 0) > 0


@gluon.jit
def copy_transition(buffers, at, transition, there, K: gl.constexpr, PARTS: gl.constexpr):
    """Begin to copy one transition, which is the sum of PARTS matrices, as number `at` of those in `buffers`."""
    for part in gl.static_range(PARTS):
        copy_rows(buffers.index(at * PARTS + part), transition + part * (K * K), gl.where(there, K, 0), K, True)
    async_copy.commit_group()


@gluon.jit
def through_segments(
    S, added, transition, at, step, count, part, K: gl.constexpr, V: gl.constexpr, TYPE: gl.constexpr, DELTA: gl.constexpr,
    LASTING: gl.constexpr, BACK: gl.constexpr, STARTED: gl.constexpr,
):  # fmt: skip
    """S taken through `count` segments, or its gradient back through them: what a segment adds and its transition lie at number
    `at`, those of the next `step` further. Without STARTED S is 0, and the first transition is not read. Without DELTA a
    transition is one decay. LASTING: S and transitions as sums of two numbers of 16 bits each, as nothing is forgotten and what
    each segment rounds would add up."""
    BV: gl.constexpr = S.shape[0]
    KEYS: gl.constexpr = S.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    PARTS: gl.constexpr = 2 if LASTING else 1
    STAGES: gl.constexpr = 2 if LASTING else 3
    c = part * BV + gl.arange(0, BV, gl.SliceLayout(1, KEYS))
    d = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    adds = added + at * (K * V) + c[:, None] * K + d[None, :]
    R = gl.load(adds, count > 0, 0.0)
    if not STARTED:
        S = R
        count -= 1
        at += step
        adds += step * (K * V)
        R = gl.load(adds, count > 0, 0.0)
    if DELTA:
        transition += at * (PARTS * K * K)
        SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, K], TYPE)
        through = gl.allocate_shared_memory(TYPE, [STAGES * PARTS, K, K], SQUARE)
        zeros = gl.zeros([BV, K], gl.float32, KEYS)
        for ahead in gl.static_range(STAGES - 1):
            copy_transition(through, ahead, transition, ahead < count, K, PARTS)
            transition += step * (PARTS * K * K)
    else:
        transition += at
    for n in range(count):
        adds += step * (K * V)
        if DELTA:
            async_copy.wait_group(STAGES - 2)
            rounded = S.to(TYPE)
            low = gl.convert_layout(rounded, LEFT)
            now = n % STAGES * PARTS
            if LASTING:
                rest = gl.convert_layout((S - rounded.to(gl.float32)).to(TYPE), LEFT)
                right, right_rest = through.index(now), through.index(now + 1)
                if not BACK:
                    right, right_rest = right.permute((1, 0)), right_rest.permute((1, 0))
                S = warpgroup_mma(low, right_rest, zeros, use_acc=False, is_async=True)
                S = warpgroup_mma(rest, right, S, is_async=True)
                S = warpgroup_mma(low, right, S, is_async=True)
                S, low, rest = warpgroup_mma_wait(0, deps=[S, low, rest])
            else:
                right = through.index(now)
                S = warpgroup_mma(low, right if BACK else right.permute((1, 0)), zeros, use_acc=False, is_async=True)
            copy_transition(through, (n + STAGES - 1) % STAGES, transition, n + STAGES - 1 < count, K, PARTS)
            transition += step * (PARTS * K * K)
            if not LASTING:
                S, low = warpgroup_mma_wait(0, deps=[S, low])
        else:
            S *= gl.load(transition)
            transition += step
        S += R
        R = gl.load(adds, n + 1 < count, 0.0)
    if DELTA:
        async_copy.wait_group(0)
    return S


@gluon.jit
def start_of_segment(
    begin, added, transition, norms, cu_seqlens, segment, sequence, earlier, head, part, time, length,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, TYPE: gl.constexpr, DELTA: gl.constexpr,
    LASTING: gl.constexpr, STARTED: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """The state [columns, keys] that a segment starts from: that of its sequence, taken through the segments before, see
    `segments_needed`."""
    S = load_state(begin, sequence * HV + head, part, K, V, BV, STARTED)
    if added is not None:
        if cu_seqlens is not None:
            number, _ = pieces_of_sequence(cu_seqlens, sequence, time, length, 1)
            earlier = segment - number
        needed = earlier
        if norms is not None:
            needed = segments_needed(norms, (segment - 1) * HV + head, -HV, earlier, NORMS)
            S = gl.where(needed < earlier, 0.0 * S, S)
        at = (segment - needed).to(gl.int64) * HV + head
        S = through_segments(S, added, transition, at, HV, needed, part, K, V, TYPE, DELTA, LASTING, False, STARTED)
    return S
