"""What the passes take of a chunk, from its tokens alone, in Gluon for Hopper GPUs: see the head of this folder."""

from __future__ import annotations

from ...common.hopper_tiles import as_left, copy_rows, product_layout, store_in_order
from ...common.math import clamp_decay
from ...common.packing import program_chunk
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .channel import decay_channels, either, load_tile
from .passes import T_PLACE, add, factors_of
from .write_keys import precondition_keys


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
def on_diagonal(blocks, SQUARE: gl.constexpr):
    """[64, 64] whose diagonal blocks are these, and 0 elsewhere."""
    zero = gl.zeros([64, 64], gl.float32, SQUARE).reshape([64, 4, 16])
    LAYOUT: gl.constexpr = zero.type.layout
    j = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    own = (j // 16)[:, None] == b[None, :]
    blocks = gl.convert_layout(blocks, gl.SliceLayout(1, LAYOUT))
    return gl.convert_layout(gl.where(own[:, :, None], blocks[:, None, :], zero).reshape([64, 64]), SQUARE)


@gluon.jit
def take_row(X, solved, rows, row: gl.constexpr, first: gl.constexpr):
    """X [4, 16, 4], the rows from `first` on of all columns, without what they take from a row that is solved."""
    return X - solved[:, :, None] * rows.slice(row, 1, dim=1).slice(first, 4, dim=2).load(X.type.layout)


@gluon.jit
def blocks_inverse(A, SQUARE: gl.constexpr):
    """X, the inverses of the diagonal blocks of I + A [64, 64], by substitution: a thread has a column of a block, and four rows
    of it in each of four tensors. A comes transposed; X comes back transposed and as it is."""
    COLUMN: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 16, 1], [4, 1, 1], [2, 1, 0])
    NARROW: gl.constexpr = product_layout(4, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rows = gl.allocate_shared_memory(gl.float32, [4, 16, 16], LINE)
    D = gl.convert_layout(own_block(A), NARROW).reshape([4, 16, 16])
    IN_BLOCKS: gl.constexpr = D.type.layout
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
    solved = gl.allocate_shared_memory(gl.float32, [4, 16, 16], LINE)
    X = gl.join(gl.join(X0, X2), gl.join(X1, X3))
    solved.store(X.permute((0, 1, 3, 4, 2)).reshape([4, 16, 16]))
    transposed = gl.convert_layout(solved.load(IN_BLOCKS).reshape([64, 16]), NARROW)
    straight = gl.convert_layout(solved.permute((0, 2, 1)).load(IN_BLOCKS).reshape([64, 16]), NARROW)
    return on_diagonal(transposed, SQUARE), on_diagonal(straight, SQUARE)


@gluon.jit
def inverse_transposed(A):
    """(I + A)^-1 of a strictly lower triangular A [64, 64]; both transposed. X holds the inverses of the diagonal blocks of 16, L
    what is below them. With N = X L, where N^4 = 0, it is (I + N)^-1 X = X - N (X - N (X - N X))."""
    SQUARE: gl.constexpr = A.type.layout
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    Xt, X = blocks_inverse(A, SQUARE)
    j = gl.arange(0, 64, gl.SliceLayout(1, SQUARE)) // 16
    i = gl.arange(0, 64, gl.SliceLayout(0, SQUARE)) // 16
    zeros = gl.zeros([64, 64], gl.float32, SQUARE)
    below = gl.allocate_shared_memory(gl.float32, [64, 64], SHARED)
    store_in_order(below, gl.where(j[:, None] < i[None, :], A, 0.0))
    fence_async_shared()
    left = as_left(X)
    N = warpgroup_mma(left, below.permute((1, 0)), zeros, use_acc=False, is_async=True)
    N, left = warpgroup_mma_wait(0, deps=[N, left])
    store_in_order(below, -N)
    fence_async_shared()
    Y = Xt
    for _ in gl.static_range(3):
        left = as_left(Y)
        Y = warpgroup_mma(left, below.permute((1, 0)), zeros, use_acc=False, is_async=True)
        Y, left = warpgroup_mma_wait(0, deps=[Y, left])
        Y += Xt
    return Y


@gluon.jit
def store_square(staged, x, at):
    """Write x, transposed, as a tile [64, 64]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    staged.permute((1, 0)).store(x.to(staged.dtype))
    gl.store(at + i[:, None] * 64 + c[None, :], staged.load(LAYOUT))


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
            g_low = load_tile(g, count, G_ROW)
            g_high = load_tile(g + 64, count, G_ROW)
    async_copy.wait_group(0)
    if gram is not None:
        precond_g += first * (HV // HEADS_PG) + head // HEADS_PG
        precond_beta += first * (HV // HEADS_PB) + head // HEADS_PB
        gram += (m.to(gl.int64) * HV + head) * K
        decay += precondition_keys(
            ws, ks, gram, precond_g, precond_beta, center + head, w, count, power, eps, HV, HEADS_PG, HEADS_PB
        )
    made += (m.to(gl.int64) * HV + head) * RECORD
    if DECAY == 2:
        if gram is not None:  # held before, they would crowd the registers
            g_low = load_tile(g, count, G_ROW)
            g_high = load_tile(g + 64, count, G_ROW)
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
        decay += 0.0 * (gl.convert_layout(norms, LINE) + gain)
    else:
        scores = warpgroup_mma_wait(0, deps=[scores])
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
        T = gl.convert_layout(inverse_transposed(gl.convert_layout(A, product_layout(4, 64, 8))), SQUARE)
        bad = (0.0 * summed.load(BY_I))[None, :]
        if KEPT:
            store_square(staged, T + bad, made + T_PLACE)
        store_square(staged, T * gains.load(BY_J)[:, None] + bad, solved + (m.to(gl.int64) * HV + head) * 4096)
