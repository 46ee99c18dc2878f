"""The gradients of the preconditioner's write keys, in Gluon for Hopper GPUs: `precondition_grads` and `key_energy_backward` of
this family. All that depends on one chunk is found in one launch; what comes from later chunks is added by a second, after a
scan over the chunks.

64 channels at a time. Each of two warpgroups has half of the columns of a product, whose operands all come from shared memory."""

from __future__ import annotations

from ...common.hopper_tiles import add, copy_rows, row_places, token_layout
from ...common.math import LN2
from ...common.packing import program_chunk
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .gradients_back import load_sums, row_sums
from .write_keys import LARGEST, approximate, keep_gates, load_gates, pair_decays, widen

# 1 + |r| times A, whose reciprocal serves both, stays within float32 where r is counted in steps. Gradients of r and A are then
# left without their common factor, which rows and sums get.
STEP = gl.constexpr(2.0**-7)
UNIT = gl.constexpr(LN2.value * 2.0**-14)


@gluon.jit
def tiles(TYPE: gl.constexpr, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(TYPE, [COUNT, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], TYPE))


@gluon.jit
def copy_parts(buffers, x, live, STRIDE: gl.constexpr):
    """Begin to copy rows, 64 channels into each buffer."""
    PARTS: gl.constexpr = buffers.shape[0]
    for part in gl.static_range(PARTS):
        copy_rows(buffers.index(part), x + part * 64, live, STRIDE, True)


@gluon.jit
def copy_begins(buffers, gram):
    """Begin to copy A at the chunk's start, 64 channels into each buffer."""
    c = gl.arange(0, 64, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    PARTS: gl.constexpr = buffers.shape[0]
    for part in gl.static_range(PARTS):
        async_copy.async_copy_global_to_shared(buffers.index(part), gram + part * 64 + c)


@gluon.jit
def own_part(x):
    """Of x [64, 64] the sums over what a thread has of a row [64, 2, 4]."""
    return gl.sum(gl.sum(x.reshape([64, 2, 4, 4, 2]), 4), 2)


@gluon.jit
def squash_back(keys, grad, square, energy, weighted, lines, begin, middle, power, eps, SQUARE: gl.constexpr):
    """Of 64 channels, from the gradient of write keys: what reaches the keys directly, and, divided by UNIT, r and A. `square`,
    k^2, goes into energy. begin [64]: A at the chunk's start."""
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    energy.store(square.to(energy.dtype))
    fence_async_shared()
    gl.thread_barrier()
    A = warpgroup_mma(weighted, energy, gl.zeros([64, 64], gl.float32, SQUARE), use_acc=False, is_async=True)
    since = approximate(lines.slice(0, 64).load(ROW), "ex2")
    begin = begin.load(gl.SliceLayout(0, SQUARE))
    square = lines.slice(64, 64).load(ROW)[:, None] * square + (since[:, None] * begin[None, :] + eps)
    A = warpgroup_mma_wait(0, deps=[A]) + square
    r = approximate(A, "lg2") * (LN2 * STEP) - middle * STEP
    far = STEP + gl.abs(r)
    inverse = approximate(A * far, "rcp")
    closeness = inverse * A
    slope = -power * closeness
    direct = approximate(slope * r, "ex2") * grad
    grad_r = slope * closeness * (direct * keys)
    return direct, grad_r, grad_r * (inverse * far)


@gluon.jit(do_not_specialize=["time"])
def write_key_grads(
    k, dw, dk, gram, precond_g, precond_beta, center, sums, totals, dcenter, dg, dbeta, chunks, time, power, eps,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, HEADS_PG: gl.constexpr, HEADS_PB: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: what the gradient of its write keys dw [BT, HV, K] gives to the keys, added to dk [BT, HV, K], to
    the preconditioner's gates (dg, dbeta [BT, HV]), to the centre (dcenter [M, HV]) and to A at its start (sums [M, HV, K]); and
    its log decay (totals [M, HV]). gram [M, HV, K]: A at the chunks' starts. What comes from later chunks `add_later_grads` adds.
    A token's decay acts on pairs of an earlier token and itself or a later one: summed from the last token on, pairs that lie on
    one side of it cancel."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    TYPE: gl.constexpr = k.dtype.element_ty
    SQUARE: gl.constexpr = token_layout(64, gl.num_warps())
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    ks, dws, dks = tiles(TYPE, K // 64), tiles(TYPE, K // 64), tiles(TYPE, K // 64)
    weighted, plain, energy, grads = (
        tiles(TYPE, 1).index(0), tiles(TYPE, 1).index(0), tiles(TYPE, 1).index(0), tiles(TYPE, 1).index(0)
    )  # fmt: skip
    lines = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    found = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begins = gl.allocate_shared_memory(gl.float32, [K // 64, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    precond_g += first * (HV // HEADS_PG) + head // HEADS_PG
    precond_beta += first * (HV // HEADS_PB) + head // HEADS_PB
    decay, gain = load_gates(precond_g, precond_beta, count, HV, HEADS_PG, HEADS_PB)
    middle = gl.load(center + head)
    number = m.to(gl.int64) * HV + head
    at_row = (first * HV + head) * K
    copy_begins(begins, gram + number * K)
    copy_parts(ks, k + (first * H + head // (HV // H)) * K, count, H * K)
    copy_parts(dws, dw + at_row, count, HV * K)
    copy_parts(dks, dk + at_row, count, HV * K)
    async_copy.commit_group()
    keep_gates(lines, decay, gain)
    pairs = pair_decays(lines, SQUARE)
    weighted.store((pairs * lines.slice(64, 64).load(COLUMN)[None, :]).to(TYPE))
    plain.store(pairs.to(TYPE))
    upto, gains = lines.slice(0, 64), lines.slice(64, 64)
    c = gl.arange(0, 64, COLUMN)
    since = approximate(upto.load(ROW), "ex2") * UNIT
    row = gl.arange(0, 64, ROW)
    at_start = sums + number * K + 0 * row[:, None] + c[None, :]
    zeros = gl.zeros([64, 64], gl.float32, SQUARE)
    sum_r = own_part(zeros)
    sum_A, sum_gain = sum_r, sum_r
    async_copy.wait_group(0)
    for part in range(K // 64):
        keys, grad = widen(ks.index(part).load(SQUARE)), widen(dws.index(part).load(SQUARE))
        square = gl.minimum(keys * keys, LARGEST)
        direct, grad_r, grad_A = squash_back(
            keys, grad, square, energy, weighted, lines, begins.index(part), middle, power, eps, SQUARE
        )
        sum_r += own_part(grad_r)
        sum_A += own_part(grad_A)
        grads.store(grad_A.to(TYPE))
        fence_async_shared()
        gl.thread_barrier()
        given = warpgroup_mma(plain.permute((1, 0)), grads, zeros, use_acc=False, is_async=True)
        to_keys = gains.load(ROW) * (2.0 * UNIT)
        given = warpgroup_mma_wait(0, deps=[given]) + grad_A
        # What reaches A at the first token, decayed to the start, has come from all tokens.
        gl.store(at_start + part * 64, since[:, None] * given, (row == 0)[:, None])
        sum_gain += own_part(given * square)
        dk_part = dks.index(part)
        given = given * (keys * to_keys[:, None]) + direct
        dk_part.store((given + widen(dk_part.load(SQUARE))).to(TYPE))
        gl.thread_barrier()
    for part in gl.static_range(K // 64):
        row, at = row_places(HV * K, 64, 64)
        gl.store(dk + at_row + part * 64 + at, dks.index(part).load(at.type.layout), (row < count)[:, None])
    found.index(0).store(row_sums(sum_gain))
    found.index(1).store(row_sums(sum_r - eps * sum_A))
    t = gl.arange(0, 64, LINE)
    at_gate = first * HV + head + t * HV
    grad_gain = load_sums(found.index(0), LINE)
    gl.store(dbeta + at_gate, UNIT * grad_gain, t < count)
    # A decays all of it that is not the token's own: grad A times A is what r gets, so no product stands here.
    grad_upto = UNIT * (load_sums(found.index(1), LINE) - gains.load(LINE) * grad_gain)
    summed = gl.associative_scan(gl.where(t < count, grad_upto, 0.0), 0, add, reverse=True)
    gl.store(dg + at_gate, summed, t < count)
    gl.store(dcenter + number, -UNIT * gl.sum(row_sums(sum_r), 0))
    gl.store(totals + number, gl.sum(upto.slice(63, 1).load(gl.BlockedLayout([1], [32], [8], [0])), 0))


@gluon.jit(do_not_specialize=["time"])
def add_later_grads(
    k, dk, gram, after, precond_g, precond_beta, dg, dbeta, chunks, time,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, HEADS_PG: gl.constexpr, HEADS_PB: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: adds what comes from later chunks to dk [BT, HV, K], dg and dbeta [BT, HV]. after [M, HV, K]: the
    gradient of A at the chunks' ends."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    precond_g += first * (HV // HEADS_PG) + head // HEADS_PG
    precond_beta += first * (HV // HEADS_PB) + head // HEADS_PB
    decay, gain = load_gates(precond_g, precond_beta, count, HV, HEADS_PG, HEADS_PB)
    row, at = row_places(HV * K, 64, K)
    _, at_key = row_places(H * K, 64, K)
    ROW: gl.constexpr = gl.SliceLayout(1, at.type.layout)
    here = (row < count)[:, None]
    dk += (first * HV + head) * K
    keys = gl.load(k + (first * H + head // (HV // H)) * K + at_key, here, 0.0).to(gl.float32)
    total = gl.load(dk + at, here, 0.0).to(gl.float32)
    c = (m.to(gl.int64) * HV + head) * K + gl.arange(0, K, gl.SliceLayout(0, at.type.layout))
    begin, end = gl.load(gram + c), gl.load(after + c)
    lines = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keep_gates(lines, decay, gain)
    upto, gains = lines.slice(0, 64), lines.slice(64, 64)
    until = approximate(upto.slice(63, 1).load(ROW) - upto.load(ROW), "ex2")
    total += (2.0 * until * gains.load(ROW))[:, None] * end[None, :] * keys
    gl.store(dk + at, total.to(dk.dtype.element_ty), here)
    met = gl.convert_layout(until * gl.sum(gl.minimum(keys * keys, LARGEST) * end[None, :], 1), LINE)
    t = gl.arange(0, 64, LINE)
    at_gate = first * HV + head + t * HV
    gl.store(dbeta + at_gate, gl.load(dbeta + at_gate, t < count, 0.0) + met, t < count)
    to_end = met * gains.load(LINE)
    earlier = gl.associative_scan(to_end, 0, add) - to_end
    earlier += approximate(upto.slice(63, 1).load(LINE), "ex2") * gl.sum(begin * end, 0)
    gl.store(dg + at_gate, gl.load(dg + at_gate, t < count, 0.0) + earlier, t < count)
