"""What the systems of a chunk give to the gradients of its keys, gains and decays, in Gluon for Hopper GPUs: `system_gradients`
where all channels of a chunk fit one program. Pairs of a key and a later token are held with keys as rows, so that products take
them from registers."""

from __future__ import annotations

from ..common.hopper_tiles import add, copy_rows, product_layout
from ..common.packing import program_chunk
from ..runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .solve_systems import as_square, store_tokens


@gluon.jit
def load_row_numbers(x, first, head, i, count, HV: gl.constexpr, HEADS: gl.constexpr):
    """Of a gate [BT, HV // HEADS] the numbers of tokens i of a chunk in float32, 0 past its end."""
    at = x + first * (HV // HEADS) + head // HEADS + i * (HV // HEADS)
    return gl.load(at, i < count, 0.0).to(gl.float32)


@gluon.jit
def load_gains(beta, first, head, i, count, HV: gl.constexpr, HEADS: gl.constexpr):
    if beta is None:  # noqa: SIM108 (one is known when compiling)
        gain = gl.where(i < count, 1.0, 0.0)
    else:
        gain = load_row_numbers(beta, first, head, i, count, HV, HEADS)
    return gain


@gluon.jit
def meet(Hs, Ls):
    """<H, L>. H, float16 in the place of numbers of another type, becomes such numbers."""
    K: gl.constexpr = Hs.shape[0]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    halves = Hs._reinterpret(gl.float16, [K, K], Hs.layout)
    met = gl.zeros([64, K], gl.float32, ROWS)
    for part in gl.static_range(K // 64):
        H = halves.slice(part * 64, 64).load(ROWS).to(gl.float32)
        met += H * Ls.slice(part * 64, 64).load(ROWS).to(gl.float32)
        if Hs.dtype == gl.bfloat16:
            Hs.slice(part * 64, 64).store(H.to(Hs.dtype))
    return gl.sum(gl.sum(met, 1), 0)


@gluon.jit(do_not_specialize=["time", "stride"])
def systems_back(
    q, k, beta, gate, mix, dP, x, x_rest, e, crossed, slope, norms, units, outsides, later, d_writes, memory_gates, gate_grads,
    dk, d_diagonal, chunks, time, scale, stride,
    HV: gl.constexpr, K: gl.constexpr, HEADS_K: gl.constexpr, HEADS_BETA: gl.constexpr, HEADS_MIX: gl.constexpr,
    MEMORY_PARTS: gl.constexpr, ADAPTIVE: gl.constexpr,
):  # fmt: skip
    """One chunk of one head. crossed: see `solve_systems`; later [M, HV, K, K]: the gradient of H at the chunk's end, in the
    dtype of k; gate_grads [1, 2, BT, HV]: dbeta and dg. All others: see `system_gradients`."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    TYPE: gl.constexpr = k.dtype.element_ty
    WIDE: gl.constexpr = product_layout(4, K)
    SQUARE: gl.constexpr = product_layout(4, 64)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LEFT_K: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    TALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    KEY_ROW: gl.constexpr = HV // HEADS_K * K
    ks = gl.allocate_shared_memory(TYPE, [64, K], TALL)
    firsts = gl.allocate_shared_memory(TYPE, [2, 64, K], TALL)  # x and e, then L
    seconds = gl.allocate_shared_memory(TYPE, [2, 64, K], TALL)  # what x rounds off and q, then H
    xs, es, rest, qs = firsts.index(0), firsts.index(1), seconds.index(0), seconds.index(1)
    at_key = (first * (HV // HEADS_K) + head // HEADS_K) * K
    token = first * HV + head
    number = m.to(gl.int64) * HV + head
    copy_rows(ks, k + at_key, count, KEY_ROW, True)
    copy_rows(xs, x + token * K, count, HV * K, True)
    copy_rows(rest, x_rest + token * K, count, HV * K, True)
    copy_rows(es, e + token * K, count, HV * K, True)
    if mix is not None:
        copy_rows(qs, q + at_key, count, KEY_ROW, True)
    async_copy.commit_group()

    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    c = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    t = gl.arange(0, 64, LINE)
    decays = gate + token
    decay = gl.load(decays + gl.minimum(c, count - 1) * HV)
    total = gl.load(decays + (count - 1) * HV)
    gap = decay[None, :] - gl.load(decays + gl.minimum(i, count - 1) * HV)[:, None]
    follows = (c[None, :] >= i[:, None]) & (c < count)[None, :]
    pair = gl.where(follows, gl.exp2(gl.where(follows, gap, 0.0)), 0.0)
    gain = load_gains(beta, first, head, i, count, HV, HEADS_BETA)
    at_dP = dP + token * 64 + c[None, :] * (HV * 64) + i[:, None]
    asked = gl.load(at_dP, (c < count)[None, :], 0.0).to(gl.float32)  # what later tokens' answers make of a key's own
    outside = gl.load(outsides + number)
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    nothing = gl.zeros([64, K], gl.float32, WIDE)

    async_copy.wait_group(0)
    gl.thread_barrier()
    of_x = warpgroup_mma(ks, xs.permute((1, 0)), none, use_acc=False, is_async=True)
    of_x = warpgroup_mma(ks, rest.permute((1, 0)), of_x, is_async=True)
    of_e = warpgroup_mma(ks, es.permute((1, 0)), none, use_acc=False, is_async=True)
    if mix is not None:
        of_q = warpgroup_mma(ks, qs.permute((1, 0)), none, use_acc=False, is_async=True)
        alpha = load_row_numbers(mix, first, head, c, count, HV, HEADS_MIX)
        of_x, of_e, of_q = warpgroup_mma_wait(0, deps=[of_x, of_e, of_q])
        plain = asked * (scale * (1 - alpha))[None, :]
        asked *= alpha[None, :]
        met = plain * of_q
    else:
        of_x, of_e = warpgroup_mma_wait(0, deps=[of_x, of_e])
        met = none
    # Memory and system make nearly opposite gradients of a key. Their difference is taken before it is rounded and multiplied by
    # x, which is long where no key is.
    asked -= pair * of_e
    met += asked * of_x
    row_sums = gl.convert_layout(gl.sum(met * gain[:, None], 0), LINE)
    key_sums = gl.convert_layout(gl.sum(met, 1), LINE)
    if d_diagonal is not None:
        both = (xs.load(WIDE).to(gl.float32) + rest.load(WIDE).to(gl.float32)) * es.load(WIDE).to(gl.float32)
        gl.store(d_diagonal + number * K + column, -gl.sum(both, 0))
    left = gl.convert_layout(asked.to(TYPE), LEFT)
    left_e = gl.convert_layout((-of_x * pair).to(TYPE), LEFT)
    out = warpgroup_mma(left, xs, nothing, use_acc=False, is_async=True)
    out = warpgroup_mma(left_e, es, out, is_async=True)
    if mix is not None:
        left_q = gl.convert_layout(plain.to(TYPE), LEFT)
        out = warpgroup_mma(left_q, qs, out, is_async=True)
        out, left, left_e, left_q = warpgroup_mma_wait(0, deps=[out, left, left_e, left_q])
    else:
        out, left, left_e = warpgroup_mma_wait(0, deps=[out, left, left_e])
    gl.thread_barrier()  # of the tiles only the keys are read any more
    Ls, Hs = as_square(firsts, TYPE), as_square(seconds, TYPE)
    copy_rows(Ls, later + number * (K * K), K, K, False)
    copy_rows(Hs._reinterpret(gl.float16, [K, K], Hs.layout), units + number * (K * K), K, K, False)
    async_copy.commit_group()
    if ADAPTIVE:
        w = gl.load(slope + token + c * HV, c < count, 0.0)
        weighted = pair * w[None, :]
        of_H = gl.convert_layout(outside * gl.sum(weighted * gl.exp2(decay)[None, :], 1), gl.SliceLayout(1, WIDE))
        pairs = gl.allocate_shared_memory(TYPE, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], TYPE))
        pairs.store(pair.to(TYPE))
        fence_async_shared()
        gl.thread_barrier()
        left = gl.convert_layout(weighted.to(TYPE), LEFT_K)
        overlaps = warpgroup_mma(ks, ks.permute((1, 0)), none, use_acc=False, is_async=True)
        both = warpgroup_mma(left, pairs.permute((1, 0)), none, use_acc=False, is_async=True)
        overlaps, both, left = warpgroup_mma_wait(0, deps=[overlaps, both, left])
        of_keys = load_gains(beta, first, head, c, count, HV, HEADS_BETA)
        left = gl.convert_layout((overlaps * both * of_keys[None, :]).to(TYPE), LEFT)
    async_copy.wait_group(0)
    gl.thread_barrier()
    end_overlap = meet(Hs, Ls)
    fence_async_shared()
    gl.thread_barrier()
    onward = warpgroup_mma(ks, Ls, nothing, use_acc=False, is_async=True)
    if ADAPTIVE:
        of_norms = warpgroup_mma(ks, Hs, nothing, use_acc=False, is_async=True)
        onward, of_norms = warpgroup_mma_wait(0, deps=[onward, of_norms])
        of_norms *= of_H[:, None]
        of_norms = warpgroup_mma(left, ks, of_norms, is_async=True)
    else:
        onward = warpgroup_mma_wait(0, deps=[onward])
    onward *= gl.exp2(total - gl.load(decays + gl.minimum(row, count - 1) * HV))[:, None]
    keys = ks.load(WIDE).to(gl.float32)
    end_part = gl.sum(onward * keys, 1)
    wide_gain = load_gains(beta, first, head, row, count, HV, HEADS_BETA)
    if ADAPTIVE:  # before a sum across warps, whose numbers may take the place of what a product still reads
        of_norms, left = warpgroup_mma_wait(0, deps=[of_norms, left])
    ends = outside * gl.exp2(total) * end_overlap + gl.sum(end_part * wide_gain, 0)
    out += 2 * onward
    if ADAPTIVE:
        end_part -= 0.5 * gl.sum(of_norms * keys, 1)
        out -= of_norms
    at = row[:, None] * (HV * K) + column[None, :]
    written = gl.load(d_writes + token * K + at, (row < count)[:, None], 0.0).to(gl.float32)
    key_sums += gl.convert_layout(end_part, LINE)
    if beta is not None:
        found = key_sums + gl.convert_layout(gl.sum(written * keys, 1), LINE)
        gl.store(gate_grads + token + t * HV, found, t < count)
    gl.thread_barrier()  # no warp reads L any more
    store_tokens(xs, (out + written) * wide_gain[:, None], dk + token * K, count, HV * K)

    row_sums -= gl.load(crossed + token + t * HV, t < count, 0.0)
    if ADAPTIVE:
        norm = gl.load(norms + token + t * HV, t < count, 0.0)
        row_sums -= 0.5 * gl.load(slope + token + t * HV, t < count, 0.0) * norm * norm
    change = row_sums - load_gains(beta, first, head, t, count, HV, HEADS_BETA) * key_sums
    change = gl.where(t < count, gl.where(t == count - 1, change + ends, change), 0.0)
    change = gl.associative_scan(change, 0, add, reverse=True)
    for other in gl.static_range(MEMORY_PARTS):
        change += gl.load(memory_gates + other * stride + stride // 2 + token + t * HV, t < count, 0.0)
    gl.store(gate_grads + stride // 2 + token + t * HV, change, t < count)
