"""The iterations for all tokens of a chunk, in Gluon for Hopper GPUs, from what `prepare_systems` left.

A step has three products, X K^T, (z X) H and (M b X K^T) K. While the first one runs, the sum onto which the others add is found;
while the second runs, the result of the first becomes the operand of the third. So two programs of a multiprocessor keep its
tensor cores busy, and the keys, H and what is copied ahead are all that is in shared memory."""

from __future__ import annotations

from ..common.hopper_tiles import MULTIPROCESSORS, copy_rows, product_layout, row_places, show_to_products
from ..common.math import infinite_to_nan
from ..common.packing import program_chunk
from ..runtime.gluon import async_copy, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .answer import copy_memory, memory_answers
from .chunk import cast_in_range
from .solve import SMALLEST, SMALLEST_RIDGE, chebyshev_root, power_of_two


@gluon.jit
def load_numbers(x, at, live, LAYOUT: gl.constexpr):
    """[64, columns] in float32, 0 from row `live` on."""
    i = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    return gl.load(x + at, (i < live)[:, None], 0.0).to(gl.float32)


@gluon.jit
def store_staged(staged, x, to, live, STRIDE: gl.constexpr):
    """Write rows of x, those before `live`, by way of shared memory."""
    row, at = row_places(STRIDE, staged.shape[0], staged.shape[1])
    staged.store(x)
    gl.thread_barrier()
    gl.store(to + at, staged.load(at.type.layout), (row < live)[:, None])
    gl.thread_barrier()


@gluon.jit
def store_tokens(staged, x, to, live, STRIDE: gl.constexpr):
    """Write rows of x, those before `live`, by way of shared memory; what 16 bits round off comes back."""
    high = cast_in_range(x, to)
    store_staged(staged, high, to, live, STRIDE)
    return x - high.to(gl.float32)


@gluon.jit
def as_square(pair, TYPE: gl.constexpr):
    """[K, K] numbers of TYPE in the place of two tiles [2, 64, K]."""
    K: gl.constexpr = pair.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, K], TYPE)
    if K == 128:  # noqa: SIM108 (one is known when compiling)
        square = pair._reinterpret(TYPE, [K, K], LAYOUT)
    else:
        square = pair.index(0)._reinterpret(TYPE, [K, K], LAYOUT)
    return square


@gluon.jit
def iterate(
    b, size, keys, H, weights, kept, low, iterations, stride, SQUARE: gl.constexpr,
):  # fmt: skip
    """See `chebyshev` in solve.py. b [64, K] and weights [64, 64] in float16; size, kept, low [64]; keys, H in shared memory."""
    WIDE: gl.constexpr = b.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LEFT_K: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    WORK: gl.constexpr = gl.float16
    count = iterations + 1
    turn = 0
    x = (size / (low + chebyshev_root(turn, count)))[:, None] * b.to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    kept = kept.to(WORK)
    for _ in range(iterations):
        turn = (turn + stride) % count
        step = 1.0 / (low + chebyshev_root(turn, count))
        now = x.to(WORK) * (-step).to(WORK)[:, None]
        left = gl.convert_layout(now, LEFT_K)
        inner = warpgroup_mma(left, keys.permute((1, 0)), none, use_acc=False, is_async=True)
        held = gl.convert_layout(now * kept[:, None], LEFT)
        # A product in 16 bits is not moved out of the loop, where b in float32 would fill registers.
        x = (1.0 - step * low)[:, None] * x + (b * (step * size).to(WORK)[:, None]).to(gl.float32)
        x = warpgroup_mma(held, H.permute((1, 0)), x, is_async=True)
        inner, left = warpgroup_mma_wait(1, deps=[inner, left])
        inner = gl.convert_layout(inner.to(WORK) * weights, LEFT)
        x = warpgroup_mma(inner, keys, x, is_async=True)
        x, held, inner = warpgroup_mma_wait(0, deps=[x, held, inner])
    return x


@gluon.jit
def iterate_conjugate(
    b, solution, keys, H, weights, kept, low, channels, iterations, SQUARE: gl.constexpr,
):  # fmt: skip
    """See `conjugate_gradient` in solve.py. The solution grows in shared memory, as registers hold no fourth tile."""
    WIDE: gl.constexpr = b.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    LEFT_K: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    WORK: gl.constexpr = gl.float16
    ENOUGH: gl.constexpr = 2.0**-13
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    nothing = gl.zeros([64, b.shape[1]], gl.float32, WIDE)
    residual = b.to(gl.float32)
    solution.store(gl.zeros_like(residual))
    length = gl.sqrt(gl.maximum(gl.sum(residual * residual, 1), SMALLEST))
    direction = (residual * (1.0 / length)[:, None]).to(WORK)
    left = iterations
    while left > 0:
        of_keys = gl.convert_layout(direction, LEFT_K)
        inner = warpgroup_mma(of_keys, keys.permute((1, 0)), none, use_acc=False, is_async=True)
        held = gl.convert_layout(direction, LEFT)
        image = warpgroup_mma(held, H.permute((1, 0)), nothing, use_acc=False, is_async=True)
        inner, of_keys = warpgroup_mma_wait(1, deps=[inner, of_keys])
        inner = gl.convert_layout(inner.to(WORK) * weights, LEFT)
        image, held = warpgroup_mma_wait(0, deps=[image, held])
        image = kept[:, None] * image + 2 * low[:, None] * (direction * channels[None, :]).to(gl.float32)
        image = warpgroup_mma(inner, keys, image, is_async=True)
        image, inner = warpgroup_mma_wait(0, deps=[image, inner])
        curvature = gl.abs(gl.sum(direction.to(gl.float32) * image, 1))
        step = gl.sum(direction.to(gl.float32) * residual, 1) / gl.maximum(curvature, SMALLEST)
        step = gl.where(length < ENOUGH, 0.0, step)[:, None]
        solution.store(solution.load(WIDE) + step * direction.to(gl.float32))
        residual -= step * image
        before = length
        length = gl.sqrt(gl.maximum(gl.sum(residual * residual, 1), SMALLEST))
        turn = (length / before)[:, None]
        direction = (residual * (1.0 / length)[:, None] + turn * direction.to(gl.float32)).to(WORK)
        left = gl.where(gl.max(length, 0) < ENOUGH, 0, left - 1)
    return solution.load(WIDE)


@gluon.jit
def store_gram_gradient(
    sums, e, answers, w, norm, decay, weights, ks, spare, tiles, units, outside, number, K: gl.constexpr, TYPE: gl.constexpr,
    ADAPTIVE: gl.constexpr,
):  # fmt: skip
    """What a chunk adds to the gradient of H at its start, see `gram_sums_back`. What is in `spare` and `tiles` is lost. Keys
    are those of unit length, whose weights are float16 as well, in units of a power of two."""
    WIDE: gl.constexpr = e.type.layout
    WORK: gl.constexpr = gl.float16
    root = gl.exp2(0.5 * decay)[:, None]
    es, xs = tiles.index(0), tiles.index(1)
    gl.thread_barrier()  # no warp reads H any more
    es.store((e * root).to(TYPE))
    xs.store((answers * root).to(TYPE))
    if ADAPTIVE:
        later = gl.convert_layout(w * norm * gl.exp2(decay), gl.SliceLayout(1, weights.type.layout))
        weight = gl.sum(weights.to(gl.float32) * later[:, None], 0)
        size = power_of_two(gl.max(gl.abs(weight), 0))
        weighted = spare._reinterpret(WORK, [64, K], ks.layout)
        weight = gl.convert_layout(weight * (1.0 / size), gl.SliceLayout(1, WIDE))
        weighted.store((ks.load(WIDE).to(gl.float32) * weight[:, None]).to(WORK))
        in_H = outside * gl.sum(w * gl.exp2(2 * decay), 0)
    fence_async_shared()
    gl.thread_barrier()
    i = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    c = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    for part in gl.static_range(K // 64):
        found = gl.zeros([64, K], gl.float32, WIDE)
        at = number * (K * K) + (part * 64 + i[:, None]) * K + c[None, :]
        if ADAPTIVE:
            H = gl.load(units + at)
            some = ks.slice(part * 64, 64, dim=1).permute((1, 0))
            found = warpgroup_mma(some, weighted, found, use_acc=False, is_async=True)
            found = warpgroup_mma_wait(0, deps=[found])
            found = found * size + in_H * H.to(gl.float32)
        found = warpgroup_mma(es.slice(part * 64, 64, dim=1).permute((1, 0)), xs, found, is_async=True)
        found = warpgroup_mma(xs.slice(part * 64, 64, dim=1).permute((1, 0)), es, found, is_async=True)
        found = warpgroup_mma_wait(0, deps=[found])
        gl.store(sums + at, (-0.5 * found).to(sums.dtype.element_ty))
    gl.thread_barrier()


@gluon.jit
def passed_cycles():
    """The cycle counter of the multiprocessor, read after the warp has slept for a moment."""
    return gl.inline_asm_elementwise(
        "nanosleep.u32 100; mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_in_turn(pause):
    """Of the two programs that begin together on a multiprocessor let the second one wait so many cycles. From then on one loads
    and stores while the other multiplies, and so do those that take their places."""
    turn = (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) // MULTIPROCESSORS
    pause = gl.where(turn < 2, turn * pause, 0)
    if pause > 0:
        begun = passed_cycles()
        while passed_cycles() - begun < pause:
            pass


@gluon.jit(do_not_specialize=["time", "iterations", "stride", "pause"])
def solve_systems(
    q, gate, mix, diagonal, units, outsides, keys, weights, factors, dy, x_high, x_rest, e, y_high, y_rest, slope, crossed, dq,
    dmix, sums, writes, v, h, o, chunks, time, scale, ridge, iterations, stride, pause,
    HV: gl.constexpr, K: gl.constexpr, HEADS_K: gl.constexpr, HEADS_MIX: gl.constexpr, HEADS_W: gl.constexpr,
    ADAPTIVE: gl.constexpr, CHEBYSHEV: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """x and y [BT, HV, K], each the sum of two tensors; BACK: e from dy. keys, weights, factors: see `prepare_systems`; units:
    H at the chunk's start over its norm, outsides; slope [BT, HV]: w; crossed [BT, HV]: z x^T H e with H there; sums
    [M, HV, K, K]: what the chunk adds to the gradient of H. With o the memory answers y, or x where there is no y, at once: see
    `memory_answers`."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    begin_in_turn(pause)
    TYPE: gl.constexpr = q.dtype.element_ty
    WORK: gl.constexpr = gl.float16
    WIDE: gl.constexpr = product_layout(4, K)
    SQUARE: gl.constexpr = product_layout(4, 64)
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    TALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], TYPE)
    qs = gl.allocate_shared_memory(TYPE, [64, K], TALL)
    ks = gl.allocate_shared_memory(WORK, [64, K], gl.NVMMASharedLayout.get_default_for([64, K], WORK))
    tiles = gl.allocate_shared_memory(TYPE, [2, 64, K], TALL)
    Hs = as_square(tiles, WORK)
    number = m.to(gl.int64) * HV + head
    Q_ROW: gl.constexpr = HV // HEADS_K * K
    copy_rows(qs, q + (first * (HV // HEADS_K) + head // HEADS_K) * K, count, Q_ROW, True)
    copy_rows(ks, keys + number * (64 * K), 64, K, False)
    copy_rows(Hs, units + number * (K * K), K, K, False)
    async_copy.commit_group()
    token = first * HV + head
    if o is not None:
        memory = gl.allocate_shared_memory(TYPE, [2, 64, K], TALL)
        copy_memory(memory, writes, v, first, count, head, HV, HEADS_W)
    async_copy.commit_group()

    i = gl.arange(0, 64, ROW)
    c = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    at = i[:, None] * (HV * K) + c[None, :]
    kept = gl.load(factors + number * 128 + i)
    norm = gl.load(factors + number * 128 + 64 + i)
    channels = gl.full([K], 0.5, WORK, gl.SliceLayout(0, WIDE))
    if ADAPTIVE:
        low = gl.maximum(ridge * norm, SMALLEST_RIDGE) / norm
    elif diagonal is not None:
        given = gl.load(diagonal + head * K + c).to(gl.float32)
        level = gl.max(given, 0)
        channels = (given * (0.5 / level)).to(WORK)
        low = level / norm
    else:
        low = ridge / norm
    row = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))
    column = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    weight = gl.load(weights + number * 4096 + row[:, None] * 64 + column[None, :])
    if mix is not None:
        alpha = gl.load(mix + first * (HV // HEADS_MIX) + head // HEADS_MIX + i * (HV // HEADS_MIX), i < count, 0.0)
        alpha = alpha.to(gl.float32)[:, None]
    if BACK:
        b = load_numbers(dy + token * K, at, count, WIDE)
        if mix is not None:
            b *= alpha
    async_copy.wait_group(1)
    gl.thread_barrier()
    if not BACK:
        b = qs.load(WIDE).to(gl.float32) * scale
    size = power_of_two(gl.sum(gl.abs(b), 1) * K**-0.5)
    b = (b * (1.0 / size)[:, None]).to(WORK)
    if CHEBYSHEV:
        # So that the solution has at most about the size 1, and a step along it fits float16, for any ridge.
        begin = low * gl.minimum(1.0, 64.0 * (low + chebyshev_root(0, iterations + 1)))
        x = iterate(b, begin, ks, Hs, weight, kept, low, iterations, stride, SQUARE)
        size /= begin
    else:
        solution = gl.allocate_shared_memory(gl.float32, [64, K], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        x = iterate_conjugate(b, solution, ks, Hs, weight, kept, low, channels, iterations, SQUARE)
    if BACK:
        answers = load_numbers(x_high + token * K, at, count, WIDE) + load_numbers(x_rest + token * K, at, count, WIDE)
        unit = power_of_two(gl.sum(gl.abs(x), 1) * K**-0.5)
        left = gl.convert_layout((x * (1.0 / unit)[:, None]).to(WORK), gl.DotOperandLayout(0, WIDE, 2))
        found = gl.zeros([64, K], gl.float32, WIDE)
        found = warpgroup_mma(left, Hs.permute((1, 0)), found, use_acc=False, is_async=True)
        found, left = warpgroup_mma_wait(0, deps=[found, left])
        gl.store(crossed + token + i * HV, kept * size * unit * gl.sum(found * answers, 1), i < count)
    x = infinite_to_nan(x * (size / norm)[:, None])

    staged = ks._reinterpret(TYPE, [64, K], TALL)
    if BACK:
        w = gl.zeros([64], gl.float32, ROW)
        if slope is not None:
            along = gl.sum(x * answers, 1)
            w = gl.where(ridge * norm > SMALLEST_RIDGE, 2 * ridge * along / norm, 0.0)
            gl.store(slope + token + i * HV, w, i < count)
        if mix is not None:
            down = load_numbers(dy + token * K, at, count, WIDE)
            given = gl.sum(down * (answers - qs.load(WIDE).to(gl.float32) * scale), 1)
            gl.store(dmix + token + i * HV, given.to(dmix.dtype.element_ty), i < count)
        decay = gl.load(gate + token + gl.minimum(i, count - 1) * HV)
        w = gl.where(i < count, w, 0.0)
        outside = gl.load(outsides + number)
        store_gram_gradient(
            sums, x, answers, w, norm, decay, weight, ks, qs, tiles, units, outside, number, K, TYPE, ADAPTIVE
        )
        store_tokens(staged, x, e + token * K, count, HV * K)
        if mix is not None:
            x += (1 - alpha) * load_numbers(dy + token * K, at, count, WIDE)
        store_tokens(staged, x * scale, dq + token * K, count, HV * K)
    else:
        gl.thread_barrier()  # no warp reads the keys or H any more
        states = as_square(tiles, TYPE)
        if o is not None:
            copy_rows(states, h + number * (K * K), K, K, False)
            async_copy.commit_group()
        rest = store_tokens(staged, x, x_high + token * K, count, HV * K)
        store_tokens(staged, rest, x_rest + token * K, count, HV * K)
        if y_high is not None:
            queries = qs.load(WIDE).to(gl.float32) * scale
            x = queries + alpha * (x - queries)
            rest = store_tokens(staged, x, y_high + token * K, count, HV * K)
            store_tokens(staged, rest, y_rest + token * K, count, HV * K)
        if o is not None:
            high = cast_in_range(x, o)
            rest = cast_in_range(rest, o)
            async_copy.wait_group(0)
            show_to_products()
            out = memory_answers(high, rest, memory.index(0), memory.index(1), states, gate + token, count, HV)
            store_staged(staged, out.to(TYPE), o + token * K, count, HV * K)
