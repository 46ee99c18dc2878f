"""What the passes take of a chunk, from its tokens alone, in Gluon for Hopper GPUs: see the head of this folder."""

from __future__ import annotations

from ...common.hopper_tiles import add, as_left, copy_rows, product_layout, row_places
from ...common.math import clamp_decay
from ...common.packing import program_chunk
from ...runtime.gluon import async_copy, gl, gluon, mma_v2, warpgroup_mma, warpgroup_mma_wait
from .channel import decay_channels, either, load_halves
from .records import T_PLACE, factors_of, growth_of
from .write_keys import load_begin, load_gates, precondition_keys, prepare_energy

OLDER = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))  # [64, 16]
ROWS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [1, 0]))  # [64, 16]: 4 rows of 8 columns lie in different banks


@gluon.jit
def pick_column(x, column: gl.constexpr):
    """x[:, :, column] of numbers whose last axis lies within a thread: no instruction."""
    i = gl.arange(0, x.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, x.type.layout)))
    bits = gl.where(i[None, None, :] == column, x.to(gl.int32, bitcast=True), 0)
    return gl.reduce(bits, 2, either).to(gl.float32, bitcast=True)


@gluon.jit
def own_block(x):
    """The diagonal blocks of 16 [64, 16] of x [64, 64]."""
    parts = x.reshape([64, 4, 16])
    LAYOUT: gl.constexpr = parts.type.layout
    j = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    own = (j // 16)[:, None] == b[None, :]
    return gl.sum(gl.where(own[:, :, None], parts, 0.0), 1)


@gluon.jit
def pick_block(x, block: gl.constexpr):
    """Columns 16 block to 16 block + 15 of x [64, 64], which lie within threads: no instruction."""
    parts = x.reshape([64, 4, 16])
    LAYOUT: gl.constexpr = parts.type.layout
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    bits = gl.where(b[None, :, None] == block, parts.to(gl.int32, bitcast=True), 0)
    found = gl.reduce(bits, 1, either).to(gl.float32, bitcast=True)
    return gl.convert_layout(found, OLDER, assert_trivial=True)


@gluon.jit
def in_order(x):
    """x [64, 16], its rows ordered as `as_left` orders columns."""
    return x.reshape([8, 4, 2, 16]).permute((0, 2, 1, 3)).reshape([64, 16])


@gluon.jit
def take_row(X, solved, rows, row: gl.constexpr, first: gl.constexpr):
    """X [4, 16, 4], the rows from `first` on of all columns, without what they take from a row that is solved."""
    return X - solved[:, :, None] * rows.slice(row, 1, dim=1).slice(first, 4, dim=2).load(X.type.layout)


@gluon.jit
def blocks_inverse(A):
    """X, the inverses of the diagonal blocks of I + A [64, 64], by substitution: a thread has a column of a block, and four rows
    of it in each of four tensors. A comes transposed; X comes back transposed too, [64, 16], in shared memory twice, once
    `in_order`."""
    COLUMN: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 16, 1], [4, 1, 1], [2, 1, 0])
    NARROW: gl.constexpr = product_layout(4, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rows = gl.allocate_shared_memory(gl.float32, [4, 16, 16], LINE)
    D = gl.convert_layout(own_block(A), NARROW).reshape([4, 16, 16])
    rows.store(D)  # rows[b, l, i] is what row i takes from row l
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    zero = gl.zeros([4, 16, 4], gl.float32, COLUMN)
    X0 = zero + gl.where(j == i, 1.0, 0.0)
    X1 = zero + gl.where(j == i + 4, 1.0, 0.0)
    X2 = zero + gl.where(j == i + 8, 1.0, 0.0)
    X3 = zero + gl.where(j == i + 12, 1.0, 0.0)
    for row in gl.static_range(4):
        x = pick_column(X0, row)
        X0 = take_row(X0, x, rows, row, 0)
        X1 = take_row(X1, x, rows, row, 4)
        X2 = take_row(X2, x, rows, row, 8)
        X3 = take_row(X3, x, rows, row, 12)
    for row in gl.static_range(4):
        x = pick_column(X1, row)
        X1 = take_row(X1, x, rows, row + 4, 4)
        X2 = take_row(X2, x, rows, row + 4, 8)
        X3 = take_row(X3, x, rows, row + 4, 12)
    for row in gl.static_range(4):
        x = pick_column(X2, row)
        X2 = take_row(X2, x, rows, row + 8, 8)
        X3 = take_row(X3, x, rows, row + 8, 12)
    for row in gl.static_range(3):
        X3 = take_row(X3, pick_column(X3, row), rows, row + 12, 12)
    X = gl.join(gl.join(X0, X2), gl.join(X1, X3))
    X = X.permute((0, 1, 3, 4, 2)).reshape([64, 16])
    solved = gl.allocate_shared_memory(gl.float32, [64, 16], ROWS)
    ordered = gl.allocate_shared_memory(gl.float32, [64, 16], ROWS)
    solved.store(X)
    ordered.store(in_order(X))
    return solved, ordered


@gluon.jit
def times_block(A, ordered, block: gl.constexpr):
    """-N^T [64, 16] `in_order`, of a block of columns; see `inverse_transposed`."""
    above = gl.arange(0, 64, gl.SliceLayout(1, OLDER)) < 16 * block
    left = as_left(gl.where(above[:, None], pick_block(A, block), 0.0))
    right = ordered.slice(16 * block, 16).load(gl.DotOperandLayout(1, OLDER, 1))
    return in_order(-mma_v2(left, right, gl.zeros([64, 16], gl.float32, OLDER)))


@gluon.jit
def inverse_transposed(A):
    """(I + A)^-1 of a strictly lower triangular A [64, 64]; both transposed, the inverse as four blocks of columns [64, 16]. X
    holds the inverses of the diagonal blocks of 16, L what is below them. With N = X L, block b of its rows is that of X less
    N[b, a] times block a, of every a before b. The older product takes its operands from registers, so that 16 columns at a time
    need no layout of shared memory and no fence."""
    solved, ordered = blocks_inverse(A)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, OLDER, 1)
    own = gl.arange(0, 64, gl.SliceLayout(1, OLDER)) // 16
    N1 = gl.allocate_shared_memory(gl.float32, [64, 16], ROWS)
    N2 = gl.allocate_shared_memory(gl.float32, [64, 16], ROWS)
    N3 = gl.allocate_shared_memory(gl.float32, [64, 16], ROWS)
    found1 = times_block(A, ordered, 1)
    found2 = times_block(A, ordered, 2)
    found3 = times_block(A, ordered, 3)
    N1.store(found1)
    N2.store(found2)
    N3.store(found3)
    X = solved.load(OLDER)
    Y0 = gl.where(own[:, None] == 0, X, 0.0)
    Y1 = gl.where(own[:, None] == 1, X, 0.0)
    Y2 = gl.where(own[:, None] == 2, X, 0.0)
    Y3 = gl.where(own[:, None] == 3, X, 0.0)
    left = as_left(Y0)
    Y1 = mma_v2(left, N1.slice(0, 16).load(RIGHT), Y1)
    Y2 = mma_v2(left, N2.slice(0, 16).load(RIGHT), Y2)
    Y3 = mma_v2(left, N3.slice(0, 16).load(RIGHT), Y3)
    left = as_left(Y1)
    Y2 = mma_v2(left, N2.slice(16, 16).load(RIGHT), Y2)
    Y3 = mma_v2(left, N3.slice(16, 16).load(RIGHT), Y3)
    Y3 = mma_v2(as_left(Y2), N3.slice(32, 16).load(RIGHT), Y3)
    return Y0, Y1, Y2, Y3


@gluon.jit
def chunk_growth(decay, gain, norm):
    """How many times larger a chunk makes the length of a row of the state at most, which `segments_needed` reads: of tokens with
    log decay g (base 2), gain beta and keys of squared length `norm`, each does I - beta k k^T to it. NaN where one is bad."""
    return gl.exp2(gl.sum(decay + gl.log2(gl.maximum(gl.abs(1.0 - gain * norm), 1.0)), 0))


@gluon.jit
def write_tile(staged, at):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    gl.store(at + i[:, None] * 64 + c[None, :], staged.load(LAYOUT))


@gluon.jit
def store_square(staged, x, at):
    """Write x, transposed, as a tile [64, 64]."""
    staged.permute((1, 0)).store(x.to(staged.dtype))
    write_tile(staged, at)


@gluon.jit
def store_blocks(staged, blocks, factor, summed, at):
    """Write blocks of columns [64, 16], times a factor by row, transposed as a tile [64, 64]. A bad summed decay makes its row of
    the tile bad."""
    for b in gl.static_range(4):
        block = blocks[b]
        if factor is not None:
            block *= factor.load(gl.SliceLayout(1, OLDER))[:, None]
        block += (0.0 * summed.slice(16 * b, 16).load(gl.SliceLayout(0, OLDER)))[None, :]
        staged.slice(16 * b, 16).permute((1, 0)).store(block.to(staged.dtype))
    write_tile(staged, at)


@gluon.jit(do_not_specialize=["time"])
def solve_chunks(
    q, k, w, beta, g, gram, precond_g, precond_beta, center, made, solved,
    qg, kg, wg, gates, last_gate, chunks, time, scale, power, eps,
    H: gl.constexpr, HV: gl.constexpr, HEADS_W: gl.constexpr, K: gl.constexpr, RECORD: gl.constexpr,
    HEADS_G: gl.constexpr, HEADS_BETA: gl.constexpr, HEADS_PG: gl.constexpr, HEADS_PB: gl.constexpr,
    DELTA: gl.constexpr, DECAY: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: its record in `made` [M, HV, RECORD], of P, four numbers per token, and with KEPT, for a backward,
    T; and T diag(beta) in `solved` [M, HV, 64, 64]. Without DELTA there is no T. w: write keys, None where k writes. gram
    [M, HV, K], None where nothing is preconditioned: A at the chunks' starts, from which w [BT, HV, K] are written. With a
    decay per channel, DECAY 2, exp(R) takes the place of the two decays, `strong` that of the first summed decay, and qg, kg
    and wg [BT, HV, K] are written, with KEPT gates [BT, HV, K] and last_gate [M, HV, K] too, see `decay_channels`."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    TYPE: gl.constexpr = q.dtype.element_ty
    SQUARE: gl.constexpr = product_layout(4, 64)
    BY_J: gl.constexpr = gl.SliceLayout(1, SQUARE)
    BY_I: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    at_key = (first * H + head // (HV // H)) * K
    if gram is not None:
        precond_g += first * (HV // HEADS_PG) + head // HEADS_PG
        precond_beta += first * (HV // HEADS_PB) + head // HEADS_PB
        energy_decay, energy_gain = load_gates(precond_g, precond_beta, count, HV, HEADS_PG, HEADS_PB)
        gram += (m.to(gl.int64) * HV + head) * K
        middle = gl.load(center + head)
        begin = load_begin(gram, 0)
    ks = gl.allocate_shared_memory(TYPE, [64, K], WIDE)
    qs = gl.allocate_shared_memory(TYPE, [64, K], WIDE)
    copy_rows(ks, k + at_key, count, H * K, True)
    copy_rows(qs, q + at_key, count, H * K, True)
    ws = ks
    if w is not None or DECAY == 2:
        ws = gl.allocate_shared_memory(TYPE, [64, K], WIDE)
    if w is not None:
        w += (first * (HV // HEADS_W) + head // HEADS_W) * K
        if gram is None:
            copy_rows(ws, w, count, HV // HEADS_W * K, True)
    async_copy.commit_group()
    t = gl.arange(0, 64, LINE)
    if DELTA:
        at = beta + first * (HV // HEADS_BETA) + head // HEADS_BETA
        gain = gl.load(at + t * (HV // HEADS_BETA), t < count, 0.0).to(gl.float32)
    if DECAY == 1:
        at = g + first * (HV // HEADS_G) + head // HEADS_G
        decay = clamp_decay(gl.load(at + t * (HV // HEADS_G), t < count, 0.0))
    else:
        decay = gl.zeros([64], gl.float32, LINE)
    if DECAY == 2:
        G_ROW: gl.constexpr = HV // HEADS_G * K
        g += (first * (HV // HEADS_G) + head // HEADS_G) * K
        if gram is None:
            g_low, g_high = load_halves(g, count, G_ROW, K)
    if gram is not None:
        lines = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        left, bad = prepare_energy(lines, energy_decay, energy_gain, TYPE)
        decay += bad
    async_copy.wait_group(0)
    if gram is not None:
        precondition_keys(ws, ks, lines, left, gram, begin, middle, power, eps)
        if DECAY == 2:  # held before, they would crowd the registers
            g_low, g_high = load_halves(g, count, G_ROW, K)
        row, at = row_places(HV * K, 64, K)
        gl.store(w + at, ws.load(at.type.layout), (row < count)[:, None])
    made += (m.to(gl.int64) * HV + head) * RECORD
    if DECAY == 2:
        at_row = (first * HV + head) * K
        if gates is not None:
            gates += at_row
            last_gate += (m.to(gl.int64) * HV + head) * K
        writes = k + at_key if w is None else w
        scores, overlap = decay_channels(
            ks, qs, ws, q + at_key, k + at_key, writes, g, g_low, g_high, qg + at_row, kg + at_row, wg + at_row,
            factors_of(made), gates, last_gate, factors_of(made) + 192, count, scale,
            HV, G_ROW, H * K, H * K if w is None else HV // HEADS_W * K, w is not None,
        )  # fmt: skip
    else:
        zeros = gl.zeros([64, 64], gl.float32, SQUARE)
        scores = warpgroup_mma(ws, qs.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if DELTA:
            overlap = warpgroup_mma(ws, ks.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores, overlap = warpgroup_mma_wait(0, deps=[scores, overlap])
    if DELTA:
        # A token with a bad key or gate makes the decays from it on NaN.
        norms = own_block(overlap)
        e = gl.arange(0, 16, gl.SliceLayout(0, norms.type.layout))
        f = gl.arange(0, 64, gl.SliceLayout(1, norms.type.layout)) % 16
        norms = gl.sum(gl.where(f[:, None] == e[None, :], norms, 0.0), 1)
        norms = gl.convert_layout(norms, LINE)
        decay += 0.0 * (norms + gain)
        if DECAY == 1 and w is None:
            gl.store(growth_of(made), chunk_growth(decay, gain, norms))
    else:
        scores = warpgroup_mma_wait(0, deps=[scores])
        if DECAY == 1:
            gl.store(growth_of(made), gl.exp2(gl.sum(decay, 0)))
    decay = gl.associative_scan(decay, 0, add)
    per_token = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    summed = per_token.slice(0, 64)
    gains = per_token.slice(64, 64)
    summed.store(decay)
    if DELTA:
        gain = gl.where(decay == decay, gain, 0.0)
        gains.store(gain)
    total = summed.slice(63, 1).load(LINE)
    from_i = summed.load(BY_I)
    from_j = summed.load(BY_J)
    i = gl.arange(0, 64, BY_I)
    j = gl.arange(0, 64, BY_J)
    if DECAY == 1:
        pair = gl.exp2(gl.where(i[None, :] >= j[:, None], from_i[None, :] - from_j[:, None], 0.0))
    if DELTA:
        if DECAY == 1:
            overlap *= pair
        until = gl.where(from_i == from_i, i, -1)  # no row of A has a bad number
        A = gl.where(until[None, :] > j[:, None], overlap * gains.load(BY_I)[None, :], 0.0)
    staged = gl.allocate_shared_memory(TYPE, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], TYPE))
    if DECAY == 1:
        scores *= pair * scale
    elif DECAY == 0:
        scores *= scale
    scores += 0.0 * scores  # infinities become NaN
    store_square(staged, gl.where(i[None, :] >= j[:, None], scores, 0.0), made)
    factors = factors_of(made) + t
    if DECAY < 2:
        gl.store(factors, gl.exp2(decay))
        gl.store(factors + 64, gl.exp2(total - decay))
        gl.store(factors + 192, decay)
    if DELTA:
        gl.store(factors + 128, gain)
        T = inverse_transposed(A)
        if KEPT:
            store_blocks(staged, T, None, summed, made + T_PLACE)
        store_blocks(staged, T, gains, summed, solved + (m.to(gl.int64) * HV + head) * 4096)
