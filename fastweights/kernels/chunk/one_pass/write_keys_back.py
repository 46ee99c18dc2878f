"""The gradients of the preconditioner's write keys, in Gluon for Hopper GPUs: `precondition_grads` and `key_energy_backward` of
this family. All that depends on one chunk is found in one launch; what comes from later chunks is added by a second, after a
scan over the chunks.

64 channels at a time. Each of two warpgroups has half of the columns of a product, whose operands all come from shared memory."""

from __future__ import annotations

from ...common.hopper_tiles import copy_rows, row_places, token_layout
from ...common.math import LN2
from ...common.packing import program_chunk
from ...runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .gradients_back import load_sums, row_sums
from .passes import add
from .write_keys import LARGEST, approximate, load_gates, pair_decays


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
def own_part(x):
    """Of x [64, 64] the sums over what a thread has of a row [64, 2, 4]."""
    return gl.sum(gl.sum(x.reshape([64, 2, 4, 4, 2]), 4), 2)


@gluon.jit
def find_gates(
    lines, weighted, precond_g, precond_beta, first, head, count,
    HV: gl.constexpr, HEADS_PG: gl.constexpr, HEADS_PB: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    """Gates into lines, see `load_gates`, and exp(G_i - G_j) beta_j into `weighted`. exp(G_i - G_j) comes back."""
    precond_g += first * (HV // HEADS_PG) + head // HEADS_PG
    precond_beta += first * (HV // HEADS_PB) + head // HEADS_PB
    load_gates(lines, precond_g, precond_beta, count, HV, HEADS_PG, HEADS_PB)
    pairs = pair_decays(lines, SQUARE)
    weighted.store((pairs * lines.slice(64, 64).load(gl.SliceLayout(0, SQUARE))[None, :]).to(weighted.dtype))
    return pairs


@gluon.jit
def squash_back(keys, grad, energy, weighted, lines, begin, middle, power, eps, SQUARE: gl.constexpr):
    """Of 64 channels, from the gradient of write keys: what reaches the keys directly, A, and the centre, and the gradient of A
    times what A has from before each token, for the decays. k^2 goes into energy. begin: A at the chunk's start."""
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    square = gl.minimum(keys * keys, LARGEST)
    energy.store(square.to(energy.dtype))
    fence_async_shared()
    gl.thread_barrier()
    A = warpgroup_mma(weighted, energy, gl.zeros([64, 64], gl.float32, SQUARE), use_acc=False, is_async=True)
    since = approximate(lines.slice(0, 64).load(ROW), "ex2")
    square = lines.slice(64, 64).load(ROW)[:, None] * square + eps
    begin = since[:, None] * begin[None, :]
    earlier = warpgroup_mma_wait(0, deps=[A]) + begin
    A = earlier + square
    r = approximate(A, "lg2") * LN2 - middle
    closeness = approximate(1.0 + gl.abs(r), "rcp")
    direct = approximate(-power * r * closeness, "ex2") * grad
    grad_r = (-power * LN2) * (closeness * closeness) * direct * keys
    grad_A = grad_r * approximate(A, "rcp")
    return direct, grad_A, -grad_r, grad_A * earlier


@gluon.jit(do_not_specialize=["time"])
def write_key_grads(
    k, dw, gram, precond_g, precond_beta, center, sums, totals, dcenter, dg, dbeta, chunks, time, power, eps,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, HEADS_PG: gl.constexpr, HEADS_PB: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: what the gradient of its write keys dw [BT, HV, K] gives to the keys, written in the place of dw, to
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
    ks, dws = tiles(TYPE, K // 64), tiles(TYPE, K // 64)
    weighted, plain, energy, grads = (
        tiles(TYPE, 1).index(0), tiles(TYPE, 1).index(0), tiles(TYPE, 1).index(0), tiles(TYPE, 1).index(0)
    )  # fmt: skip
    lines = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    found = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dw += (first * HV + head) * K
    copy_parts(ks, k + (first * H + head // (HV // H)) * K, count, H * K)
    copy_parts(dws, dw, count, HV * K)
    async_copy.commit_group()
    pairs = find_gates(lines, weighted, precond_g, precond_beta, first, head, count, HV, HEADS_PG, HEADS_PB, SQUARE)
    plain.store(pairs.to(TYPE))
    upto, gains = lines.slice(0, 64), lines.slice(64, 64)
    number = m.to(gl.int64) * HV + head
    c = gl.arange(0, 64, COLUMN)
    gram += number * K + c
    middle = gl.load(center + head)
    since = approximate(upto.load(ROW), "ex2")
    row = gl.arange(0, 64, ROW)
    at_start = sums + number * K + 0 * row[:, None] + c[None, :]
    zeros = gl.zeros([64, 64], gl.float32, SQUARE)
    grad_upto = own_part(zeros)
    grad_gain, grad_center = grad_upto, grad_upto
    async_copy.wait_group(0)
    for part in range(K // 64):
        begin = gl.load(gram + part * 64)
        dw_part = dws.index(part)
        keys, grad = ks.index(part).load(SQUARE).to(gl.float32), dw_part.load(SQUARE).to(gl.float32)
        direct, grad_A, from_squash, met = squash_back(
            keys, grad, energy, weighted, lines, begin, middle, power, eps, SQUARE
        )
        grad_center += own_part(from_squash)
        grad_upto += own_part(met)
        dw_part.store(direct.to(TYPE))
        grads.store(grad_A.to(TYPE))
        fence_async_shared()
        gl.thread_barrier()
        given_later = warpgroup_mma(plain.permute((1, 0)), grads, zeros, use_acc=False, is_async=True)
        gain = gains.load(ROW)[:, None]
        square = gl.minimum(keys * keys, LARGEST)
        given_later = warpgroup_mma_wait(0, deps=[given_later])
        grad_upto -= own_part(gain * (square * given_later))
        given = given_later + grad_A
        # What reaches A at the first token, decayed to the start, has come from all tokens.
        gl.store(at_start + part * 64, since[:, None] * given, (row == 0)[:, None])
        grad_gain += own_part(given * square)
        given *= keys * (2.0 * gain)
        dw_part.store((dw_part.load(SQUARE).to(gl.float32) + given).to(TYPE))
        gl.thread_barrier()
    for part in gl.static_range(K // 64):
        row, at = row_places(HV * K, 64, 64)
        gl.store(dw + part * 64 + at, dws.index(part).load(at.type.layout), (row < count)[:, None])
    found.index(0).store(row_sums(grad_gain))
    found.index(1).store(row_sums(grad_upto))
    t = gl.arange(0, 64, LINE)
    at_gate = first * HV + head + t * HV
    gl.store(dbeta + at_gate, load_sums(found.index(0), LINE), t < count)
    summed = gl.associative_scan(gl.where(t < count, load_sums(found.index(1), LINE), 0.0), 0, add, reverse=True)
    gl.store(dg + at_gate, summed, t < count)
    gl.store(dcenter + number, gl.sum(row_sums(grad_center), 0))
    gl.store(totals + number, gl.sum(upto.slice(63, 1).load(gl.BlockedLayout([1], [32], [8], [0])), 0))


@gluon.jit(do_not_specialize=["time"])
def add_later_grads(
    k, dw, dk, gram, after, precond_g, precond_beta, dg, dbeta, chunks, time,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, HEADS_PG: gl.constexpr, HEADS_PB: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: adds what `write_key_grads` left in dw to dk [BT, HV, K], and what comes from later chunks to dk, dg
    and dbeta [BT, HV]. after [M, HV, K]: the gradient of A at the chunks' ends."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    row, at = row_places(HV * K, 64, K)
    _, at_key = row_places(H * K, 64, K)
    ROW: gl.constexpr = gl.SliceLayout(1, at.type.layout)
    here = (row < count)[:, None]
    dk += (first * HV + head) * K
    keys = gl.load(k + (first * H + head // (HV // H)) * K + at_key, here, 0.0).to(gl.float32)
    total = gl.load(dk + at, here, 0.0).to(gl.float32)
    total += gl.load(dw + (first * HV + head) * K + at, here, 0.0).to(gl.float32)
    c = (m.to(gl.int64) * HV + head) * K + gl.arange(0, K, gl.SliceLayout(0, at.type.layout))
    begin, end = gl.load(gram + c), gl.load(after + c)
    lines = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    precond_g += first * (HV // HEADS_PG) + head // HEADS_PG
    precond_beta += first * (HV // HEADS_PB) + head // HEADS_PB
    load_gates(lines, precond_g, precond_beta, count, HV, HEADS_PG, HEADS_PB)
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
