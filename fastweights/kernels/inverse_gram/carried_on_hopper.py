"""Where tokens also add to A: what `chunk_adjoint` and `finish_gradients` do, in Gluon for Hopper GPUs, in bfloat16. Where one
rounding would be too much, an operand is the sum of two numbers. See the head of this package."""

from __future__ import annotations

from ..common.hopper_tiles import add, load_chunk_rows, product_layout, show_to_products, token_layout
from ..common.packing import program_chunk
from ..runtime.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait

TYPE = gl.constexpr(gl.bfloat16)


@gluon.jit
def new_tile(COUNT: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Room for so many tiles of bfloat16."""
    return gl.allocate_shared_memory(
        TYPE, [COUNT, HEIGHT, WIDTH], gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], TYPE)
    )


@gluon.jit
def store_two(tiles, x):
    """x as the sum of two."""
    high = x.to(TYPE)
    tiles.index(0).store(high)
    tiles.index(1).store((x - high.to(gl.float32)).to(TYPE))


@gluon.jit
def load_lifted(T, root):
    """L^-1 [64, 64] from T of the chunk; root [64]: by rows of a square."""
    SQUARE: gl.constexpr = token_layout(64, gl.num_warps())
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    return root[:, None] * gl.load(T + i * 64 + j)


@gluon.jit
def store_change(lifted):
    """L^-1 - I in shared memory."""
    i = gl.arange(0, 64, gl.SliceLayout(1, lifted.type.layout))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, lifted.type.layout))[None, :]
    change = new_tile(1, 64, 64).index(0)
    change.store((lifted - gl.where(i == j, 1.0, 0.0)).to(TYPE))
    return change


@gluon.jit
def through_factor_on_chip(dZ, Z, U, change, T, root):
    """dW [64, K], and in shared memory C [64, 64], as `through_factor` has it. Z, U, change: tiles in shared memory."""
    K: gl.constexpr = dZ.shape[1]
    SQUARE: gl.constexpr = token_layout(64, gl.num_warps())
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    grads = new_tile(1, 64, K).index(0)
    grads.store(dZ.to(TYPE))
    show_to_products()
    below = warpgroup_mma(grads, Z.permute((1, 0)), none, use_acc=False, is_async=True)
    above = warpgroup_mma(Z, grads.permute((1, 0)), none, use_acc=False, is_async=True)
    dW = warpgroup_mma(change.permute((1, 0)), grads, dZ, is_async=True)
    lifted = load_lifted(T, root)
    below, above, dW = warpgroup_mma_wait(0, deps=[below, above, dW])
    factors, pairs = new_tile(2, 64, 64), new_tile(2, 64, 64)
    store_two(factors, lifted)
    store_two(pairs, gl.where(i > j, below, gl.where(i < j, above, below)))
    show_to_products()
    found = warpgroup_mma(pairs.index(0), factors.index(0), none, use_acc=False, is_async=True)
    found = warpgroup_mma(pairs.index(1), factors.index(0), found, is_async=True)
    found = warpgroup_mma(pairs.index(0), factors.index(1), found, is_async=True)
    found = warpgroup_mma_wait(0, deps=[found])
    gl.thread_barrier()  # no warp reads the pairs any more
    store_two(pairs, found)
    show_to_products()
    found = warpgroup_mma(factors.index(0).permute((1, 0)), pairs.index(0), none, use_acc=False, is_async=True)
    found = warpgroup_mma(factors.index(1).permute((1, 0)), pairs.index(0), found, is_async=True)
    found = warpgroup_mma(factors.index(0).permute((1, 0)), pairs.index(1), found, is_async=True)
    found = warpgroup_mma_wait(0, deps=[found])
    C = new_tile(1, 64, 64).index(0)
    C.store((-gl.where(i < j, found, gl.where(i == j, 0.5 * found, 0.0))).to(TYPE))  # it is symmetric
    show_to_products()
    dW = warpgroup_mma(C, U, dW, is_async=True)
    dW = warpgroup_mma_wait(0, deps=[dW])
    return dW, C


@gluon.jit
def load_roots(D, first, count, head, HV: gl.constexpr, LAYOUT: gl.constexpr):
    """1 / sqrt(d) of the tokens of a chunk [64], 0 where there is none."""
    i = gl.arange(0, 64, LAYOUT)
    return gl.where(i < count, gl.rsqrt(gl.load(D + first * HV + head + i * HV, i < count, 1.0)), 0.0)


@gluon.jit(do_not_specialize=["time"])
def adjoint_of_chunk(
    u, b, dy, R, D, T, transition, written, direct, chunks, time,
    HV: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, HEADS_B: gl.constexpr,
):  # fmt: skip
    """Arguments as of `chunk_adjoint`."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = token_layout(K, WARPS)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
    number = m.to(gl.int64) * HV + head
    given = load_chunk_rows(dy, first, count, head, HV, 1, K).to(gl.float32)
    rows = load_chunk_rows(R, first, count, head, HV, 1, K)
    answers = load_chunk_rows(b, first, count, head, HV, HEADS_B, K)
    tokens = load_chunk_rows(u, first, count, head, HV, HEADS, K)
    down = new_tile(2, 64, K)
    store_two(down, given)
    Z, B, U = new_tile(1, 64, K).index(0), new_tile(1, 64, K).index(0), new_tile(1, 64, K).index(0)
    Z.store((rows * load_roots(D, first, count, head, HV, gl.SliceLayout(1, rows.type.layout))[:, None]).to(TYPE))
    B.store(answers)
    U.store(tokens)
    root = load_roots(D, first, count, head, HV, gl.SliceLayout(1, SQUARE))
    change = store_change(load_lifted(T + number * 4096, root))
    show_to_products()
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    t = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    c = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    lifted = warpgroup_mma(change, U, U.load(WIDE).to(gl.float32), is_async=True)
    lifted = warpgroup_mma_wait(0, deps=[lifted])
    keys = new_tile(1, 64, K).index(0)
    keys.store(lifted.to(TYPE))
    show_to_products()
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    E = gl.zeros([K, K], gl.float32, WHOLE)
    E = warpgroup_mma(keys.permute((1, 0)), Z, E, use_acc=False, is_async=True)
    along_b = warpgroup_mma(B, Z.permute((1, 0)), none, use_acc=False, is_async=True)
    along_dy = warpgroup_mma(down.index(0), Z.permute((1, 0)), none, use_acc=False, is_async=True)
    E, along_b, along_dy = warpgroup_mma_wait(0, deps=[E, along_b, along_dy])
    row = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
    column = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
    gl.store(transition + number * (K * K) + row * K + column, (-E).to(TYPE))
    scores = new_tile(2, 64, 64)
    scores.index(0).store(gl.where(i >= j, -along_b, 0.0).to(TYPE))
    scores.index(1).store(gl.where(i >= j, -along_dy, 0.0).to(TYPE))
    show_to_products()
    dZ = gl.zeros([64, K], gl.float32, WIDE)
    dZ = warpgroup_mma(scores.index(0).permute((1, 0)), down.index(0), dZ, use_acc=False, is_async=True)
    dZ = warpgroup_mma(scores.index(1).permute((1, 0)), B, dZ, is_async=True)
    dZ = warpgroup_mma_wait(0, deps=[dZ])
    gl.store(direct + (first * HV + head) * K + t[:, None] * (HV * K) + c[None, :], dZ, (t < count)[:, None])
    dW, C = through_factor_on_chip(dZ, Z, U, change, T + number * 4096, root)
    found = new_tile(2, 64, K)
    store_two(found, dW)
    show_to_products()
    N = gl.zeros([K, K], gl.float32, WHOLE)
    for k in gl.static_range(2):
        part, other = down.index(1 - k), found.index(1 - k)
        N = warpgroup_mma(part.permute((1, 0)), B, N, is_async=True)
        N = warpgroup_mma(B.permute((1, 0)), part, N, is_async=True)
        N = warpgroup_mma(other.permute((1, 0)), U, N, is_async=True)
        N = warpgroup_mma(U.permute((1, 0)), other, N, is_async=True)
    N = warpgroup_mma_wait(0, deps=[N])
    gl.store(written + number * (K * K) + row * K + column, N.to(TYPE))


@gluon.jit
def times_matrix(rows, matrix, out, SIGN: gl.constexpr):
    """out + SIGN x A of rows [2, 64, K], a sum of two, and a matrix A [K, K], likewise in float32, by 64 rows of A."""
    COUNT: gl.constexpr = 1 if matrix.dtype.element_ty == TYPE else 2
    K: gl.constexpr = out.shape[1]
    PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, 64, gl.SliceLayout(1, PLACES))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, PLACES))[None, :]
    part = new_tile(COUNT, 64, K)
    given = gl.load(matrix + r * K + c)
    for k in gl.static_range(K // 64):
        if COUNT == 1:
            part.index(0).store((SIGN * given.to(gl.float32)).to(TYPE))
        else:
            store_two(part, SIGN * given)
        show_to_products()
        high, rest = rows.index(0).slice(64 * k, 64, dim=1), rows.index(1).slice(64 * k, 64, dim=1)
        out = warpgroup_mma(rest, part.index(0), out, is_async=True)
        if COUNT == 2:
            out = warpgroup_mma(high, part.index(1), out, is_async=True)
        out = warpgroup_mma(high, part.index(0), out, is_async=True)
        if k + 1 < K // 64:
            given = gl.load(matrix + (64 * (k + 1) + r) * K + c)
        out = warpgroup_mma_wait(0, deps=[out])
        gl.thread_barrier()  # no warp reads this part any more
    return out


@gluon.jit(do_not_specialize=["time"])
def gradients_of_chunk(
    u, refresh, A, R, D, T, adjoint, direct, du, chunks, time, HV: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr
):
    """Arguments as of `finish_gradients`."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = token_layout(K, WARPS)
    SQUARE: gl.constexpr = token_layout(64, WARPS)
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    number = m.to(gl.int64) * HV + head
    t = gl.arange(0, 64, BY_TOKEN)
    added = gl.load(refresh + first + t, t < count, 0.0)
    before = gl.convert_layout(gl.associative_scan(added, 0, add) - added, gl.SliceLayout(1, WIDE))[:, None]
    rows = load_chunk_rows(R, first, count, head, HV, 1, K)
    tokens = load_chunk_rows(u, first, count, head, HV, HEADS, K)
    t = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    c = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    at, live = (first * HV + head) * K + t[:, None] * (HV * K) + c[None, :], (t < count)[:, None]
    dZ = gl.load(direct + at, live, 0.0)
    Z, U = new_tile(2, 64, K), new_tile(1, 64, K).index(0)
    store_two(Z, rows * load_roots(D, first, count, head, HV, gl.SliceLayout(1, rows.type.layout))[:, None])
    U.store(tokens)
    dZ = times_matrix(Z, adjoint + number * (K * K), dZ, -1.0)
    root = load_roots(D, first, count, head, HV, gl.SliceLayout(1, SQUARE))
    change = store_change(load_lifted(T + number * 4096, root))
    dW, C = through_factor_on_chip(dZ, Z.index(0), U, change, T + number * 4096, root)
    V = warpgroup_mma(C.permute((1, 0)), U, dW, is_async=True)
    V = warpgroup_mma_wait(0, deps=[V])
    scaled = new_tile(1, 64, K).index(0)
    scaled.store((before * U.load(WIDE).to(gl.float32)).to(TYPE))
    both = new_tile(2, 64, K)
    store_two(both, V)
    out = times_matrix(both, A + number * (K * K), before * dW, 1.0)
    out = warpgroup_mma(C.permute((1, 0)), scaled, out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    gl.store(du + at, out.to(du.dtype.element_ty), live)
