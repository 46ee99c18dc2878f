"""One decay per key channel, in Gluon for Hopper GPUs: the operands that the passes take of a chunk, and their products.

All decay from R or to R, the half of G_C, so that no number has more than half of what a channel loses: k exp(G - R) and
w exp(R - G). A state S meets them as exp(R) S, and leaves the chunk as exp(R) (exp(R) S + u w exp(R - G)). Of a channel that
loses more than 2^-MOST_LOST, R is -MOST_LOST / 2, and w exp(G_C - R - G) takes the place of w exp(R - G). Then exp(2 R) S takes
the place of exp(G_C) S: both are smaller than float32's numbers.

Flat, where no channel loses more than that in the chunk, one product has all pairs. Else those of a token of each half of the
chunk meet at the border between them, as in `common.delta_rule.channel_decay`, and those of one half in the same way as in a flat
chunk where no channel loses more than that in a half, else by halves of halves. Threads have four channels of eight tokens, 64
channels at a time.
"""

from __future__ import annotations

from ...common.hopper_tiles import product_layout, unknown_zero
from ...common.math import clamp_decay
from ...runtime.gluon import fence_async_shared, gl, gluon, mma_v2, warpgroup_mma, warpgroup_mma_wait
from .write_keys import approximate

MOST_LOST = gl.constexpr(200.0)  # in base 2, by a channel in a chunk where one product has all pairs
APART = gl.constexpr(gl.BlockedLayout([1, 8, 4], [2, 1, 16], [4, 1, 1], [2, 1, 0]))  # [8, 8, 64]
TILE = gl.constexpr(gl.BlockedLayout([8, 4], [2, 16], [4, 1], [1, 0]))  # the same as [64, 64]
EDGES = gl.constexpr(gl.SliceLayout(1, APART))  # [8, 64]


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def pick_row(x, row: gl.constexpr):
    """x[:, row] of numbers [4, rows, channels] whose rows lie within a thread: no instruction."""
    i = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
    bits = gl.where(i[None, :, None] == row, x.to(gl.int32, bitcast=True), 0)
    return gl.reduce(bits, 1, either).to(gl.float32, bitcast=True)


@gluon.jit
def tile_places(STRIDE: gl.constexpr):
    """The rows of a tile [64, 64], and the places of all numbers. A thread's rows differ by constants."""
    IN_ROWS: gl.constexpr = gl.SliceLayout(2, APART)
    b = gl.arange(0, 8, gl.SliceLayout(1, IN_ROWS)) * 8 + unknown_zero()
    r = gl.arange(0, 8, gl.SliceLayout(0, IN_ROWS))
    c = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, APART)))
    row = b[:, None] + r[None, :]
    at = (b.to(gl.int64)[:, None] * STRIDE + r.to(gl.int64)[None, :] * STRIDE)[:, :, None] + c[None, None, :]
    row = gl.convert_layout(row.reshape([64]), gl.SliceLayout(1, TILE))
    at = gl.convert_layout(at.reshape([64, 64]), TILE)
    return row, gl.max_contiguous(gl.multiple_of(at, [4, 4]), [1, 4])


@gluon.jit
def load_tile(x, count, STRIDE: gl.constexpr):
    row, at = tile_places(STRIDE)
    return gl.load(x + at, (row < count)[:, None], 0.0).to(gl.float32)


@gluon.jit
def load_halves(x, count, STRIDE: gl.constexpr, K: gl.constexpr):
    """The first 64 channels and the others; of 64 channels all, twice."""
    low = load_tile(x, count, STRIDE)
    high = low
    if K > 64:
        high = load_tile(x + 64, count, STRIDE)
    return low, high


@gluon.jit
def running_sums(x, edges, REVERSE: gl.constexpr):
    """Of the rows of x [64, 64], from the last one on with REVERSE. edges [8, 64]: takes the sums that end eight rows."""
    x = gl.convert_layout(x.reshape([8, 8, 64]), APART)
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, APART)))
    y = x
    own = gl.zeros([8, 64], gl.float32, EDGES)
    for n in gl.static_range(8):
        own += gl.convert_layout(pick_row(x, 7 - n if REVERSE else n), EDGES)
        y = gl.where((r == (7 - n if REVERSE else n))[None, :, None], own[:, None, :], y)
    edges.store(own)
    before = gl.zeros([8, 64], gl.float32, EDGES)
    b = gl.arange(0, 8, gl.SliceLayout(1, EDGES))
    for n in gl.static_range(7):
        if REVERSE:
            before += gl.where((b <= n)[:, None], edges.slice(n + 1, 1).load(EDGES), 0.0)
        else:
            before += gl.where((b > n)[:, None], edges.slice(n, 1).load(EDGES), 0.0)
    edges.store(before + own)
    return gl.convert_layout((y + before[:, None, :]).reshape([64, 64]), TILE)


@gluon.jit
def sum_decays(g, edges):
    """G [64, 64] in base 2. edges [8, 64]: takes every eighth row."""
    return running_sums(clamp_decay(g), edges, False)


@gluon.jit
def at_border(G, edges, half: gl.constexpr):
    """By halves: of every token G [64, 64] at the last token of the left half of its pair of halves."""
    if half < 8:
        parts = G.reshape([32 // half, 2 * half, 64])
        LAYOUT: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        found = gl.convert_layout(pick_row(parts, half - 1), LAYOUT)[:, None, :] + gl.zeros_like(parts)
    else:
        pairs = edges.reshape([32 // half, half // 4, 64]).slice(half // 8 - 1, 1, dim=1)
        zeros = gl.zeros([8, 64], gl.float32, EDGES).reshape([32 // half, half // 4, 64])
        found = gl.convert_layout((pairs.load(zeros.type.layout) + zeros).reshape([8, 64]), EDGES)
        found = found[:, None, :] + gl.zeros([8, 8, 64], gl.float32, APART)
    return gl.convert_layout(found.reshape([64, 64]), TILE)


@gluon.jit
def most_lost(G):
    """By a channel, of summed decays [1, channels]; infinite where one is a NaN, which then spoils no pair before it."""
    return gl.max(gl.max(gl.where(G == G, -G, float("inf")), 1), 0)


@gluon.jit
def products(ks, qs, ws):
    """w q^T and w k^T of what was just stored."""
    fence_async_shared()
    gl.thread_barrier()
    zeros = gl.zeros([64, 64], gl.float32, product_layout(4, 64))
    scores = warpgroup_mma(ws, qs.permute((1, 0)), zeros, use_acc=False, is_async=True)
    overlap = warpgroup_mma(ws, ks.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores, overlap])


@gluon.jit
def met(x, ws, pairs):
    """Of some pairs w x^T, by the older product, whose operands come from registers. As registers are full here, `warpgroup_mma`
    would be ordered one by one, in all of the kernel."""
    OLDER: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    left = ws.load(gl.DotOperandLayout(0, OLDER, 2))
    right = x.permute((1, 0)).load(gl.DotOperandLayout(1, OLDER, 2))
    found = mma_v2(left, right, gl.zeros([64, 64], gl.float32, OLDER))
    return gl.where(pairs, gl.convert_layout(found, pairs.type.layout), 0.0)


@gluon.jit
def own_products(x, w, spoiled, LAYOUT: gl.constexpr):
    """[1, 64], of every token with itself; NaN where a row of `spoiled` has one."""
    return gl.convert_layout(gl.sum(x * w + 0.0 * spoiled, 1), LAYOUT)[None, :]


@gluon.jit
def meet(
    qs, ks, ws, edges, q, k, w, g, count, scale, PARTS: gl.constexpr, G_ROW: gl.constexpr, KEY_ROW: gl.constexpr,
    WRITE_ROW: gl.constexpr,
):  # fmt: skip
    """scale w q^T and w k^T of pairs i >= j, decayed from one to the other, by halves. ks and ws [64, K] take operands, and qs of
    128 channels the summed decays, for which registers have no room beside both sums."""
    TYPE: gl.constexpr = ks.dtype
    SQUARE: gl.constexpr = product_layout(4, 64)
    BY_I: gl.constexpr = gl.SliceLayout(0, SQUARE)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    keys, writes = ks.slice(0, 64, dim=1), ws.slice(0, 64, dim=1)
    if PARTS == 1:
        queries, summed = qs, gl.allocate_shared_memory(gl.float32, [64, 64], ROWS)
    else:
        queries, summed = ks.slice(64, 64, dim=1), qs._reinterpret(gl.float32, [64, 64], ROWS)
    j = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    i = gl.arange(0, 64, BY_I)
    row = tile_places(64)[0]
    scores = gl.zeros([64, 64], gl.float32, SQUARE)
    overlap = gl.zeros([64, 64], gl.float32, SQUARE)
    for _ in range(PARTS):
        G = sum_decays(load_tile(g, count, G_ROW), edges)
        summed.store(G)
        border, total = edges.slice(3, 1).load(TILE), edges.slice(7, 1).load(TILE)
        lost = gl.maximum(most_lost(border), most_lost(total - border))
        if lost < MOST_LOST:
            middle = 0.5 * (border + gl.where((row < 32)[:, None], 0.0, total))
            writes.store((load_tile(w, count, WRITE_ROW) * approximate(middle - G, "ex2")).to(TYPE))
            since = approximate(G - middle, "ex2")
            queries.store((load_tile(q, count, KEY_ROW) * (since * scale)).to(TYPE))
            keys.store((load_tile(k, count, KEY_ROW) * since).to(TYPE))
            pairs = (i // 32)[None, :] == (j // 32)[:, None]
            scores += met(queries, writes, pairs)
            overlap += met(keys, writes, pairs)
        else:
            written = load_tile(w, count, WRITE_ROW)
            same = i[None, :] == j[:, None]
            # NaN from a bad decay on, as in a flat chunk: `solve_chunks` finds bad tokens by their products with themselves.
            scores += gl.where(same, scale * own_products(load_tile(q, count, KEY_ROW), written, G, BY_I), 0.0)
            overlap += gl.where(same, own_products(load_tile(k, count, KEY_ROW), written, G, BY_I), 0.0)
        for level in gl.static_range(6):
            if (level == 0) | (lost >= MOST_LOST):
                G = summed.load(TILE)
                factor = approximate(-gl.abs(G - at_border(G, edges, 32 >> level)), "ex2")
                writes.store((load_tile(w, count, WRITE_ROW) * factor).to(TYPE))
                keys.store((load_tile(k, count, KEY_ROW) * factor).to(TYPE))
                queries.store((load_tile(q, count, KEY_ROW) * (factor * scale)).to(TYPE))
                half = 32 >> level
                pairs = ((i & half) > 0)[None, :] & (((i ^ half) & -half)[None, :] == (j & -half)[:, None])
                scores += met(queries, writes, pairs)
                gl.thread_barrier()  # one after the other: registers hold no more
                overlap += met(keys, writes, pairs)
        q += 64
        k += 64
        w += 64
        g += 64
    return scores, overlap


@gluon.jit
def decay_channels(
    ks, qs, ws, q, k, w, g, g_low, g_high, qg, kg, wg, middles, gates, last_gate, strong, count, scale,
    HV: gl.constexpr, G_ROW: gl.constexpr, KEY_ROW: gl.constexpr, WRITE_ROW: gl.constexpr, WRITE: gl.constexpr,
):  # fmt: skip
    """scale q exp(G - R), k exp(G - R) and w exp(G_C - R - G), see the head of this file, into qg, kg and wg [.., HV, K], exp(R)
    into middles [K], unless these are None exp(G - R) into gates [.., HV, K] and G_C into last_gate [K],
    and into strong 1 where the form is not flat, else 0. What comes back is scale w q^T and w k^T of pairs i >= j, decayed from
    one to the other. ks, qs and, with WRITE, ws [64, K] hold k, q and w, and are used up; g_low and g_high [64, 64] hold g of
    the first 64 channels and of the others. G_ROW, KEY_ROW and WRITE_ROW: from row to row of what g, q and k, and w point to."""
    TYPE: gl.constexpr = ks.dtype
    PARTS: gl.constexpr = ks.shape[1] // 64
    edges = gl.allocate_shared_memory(gl.float32, [8, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row, at = tile_places(HV * PARTS * 64)
    here = (row < count)[:, None]
    c = gl.zeros([1, 64], gl.int32, TILE) + gl.arange(0, 64, gl.SliceLayout(0, TILE))[None, :]
    lost = 0.0
    for part in gl.static_range(PARTS):
        G = sum_decays(g_low if part == 0 else g_high, edges)
        total = edges.slice(7, 1).load(TILE)
        middle = 0.5 * gl.maximum(gl.where(total == total, total, 0.0), -MOST_LOST)
        gl.store(middles + part * 64 + c, approximate(middle, "ex2"))
        lost = gl.maximum(lost, most_lost(total))
        key_part = ks.slice(part * 64, 64, dim=1)
        query_part = qs.slice(part * 64, 64, dim=1)
        write_part = ws.slice(part * 64, 64, dim=1)
        writes = (write_part if WRITE else key_part).load(TILE).to(gl.float32)
        writes = (writes * approximate(total - middle - G, "ex2")).to(TYPE)
        gl.store(wg + part * 64 + at, writes, here)
        since = approximate(G - middle, "ex2")
        if gates is not None:
            gl.store(gates + part * 64 + at, since.to(TYPE), here)
            gl.store(last_gate + part * 64 + c, total)
        keys = (key_part.load(TILE).to(gl.float32) * since).to(TYPE)
        gl.store(kg + part * 64 + at, keys, here)
        key_part.store(keys)
        write_part.store(writes)
        queries = (query_part.load(TILE).to(gl.float32) * (since * scale)).to(TYPE)
        gl.store(qg + part * 64 + at, queries, here)
        query_part.store(queries)
    gl.store(strong, gl.where(lost < MOST_LOST, 0.0, 1.0))
    if lost < MOST_LOST:
        scores, overlap = products(ks, qs, ws)
    else:
        scores, overlap = meet(qs, ks, ws, edges, q, k, w, g, count, scale, PARTS, G_ROW, KEY_ROW, WRITE_ROW)
    return scores, overlap
