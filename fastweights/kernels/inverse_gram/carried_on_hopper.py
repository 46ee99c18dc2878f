"""Where tokens also add to A: what `chunk_adjoint` and `finish_gradients` do, in Gluon for Hopper GPUs, in bfloat16. Where one
rounding would be too much, an operand is the sum of two numbers. See the head of this package."""

from __future__ import annotations

from ..common.hopper_tiles import add, product_layout, row_places
from ..common.packing import program_chunk
from ..runtime.gluon import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait

TYPE = gl.constexpr(gl.bfloat16)


@gluon.constexpr_function
def halves_layout(warps, columns):
    """Of the result [64, columns] of a product of four or eight warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, warps // 4], instr_shape=[16, 4 * columns // warps, 16]
    )


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
def load_tile_rows(x, first, count, head, HV: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr):
    """A chunk's rows [64, K] of x [BT, HV // HEADS, K]."""
    row, at = row_places(HV // HEADS * K, 64, K)
    return gl.load(x + (first * (HV // HEADS) + head // HEADS) * K + at, (row < count)[:, None], 0.0)


@gluon.jit
def show_to_products():
    """What was stored in shared memory."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def through_factor_on_chip(dZ, Z, U, T, root):
    """dW [64, K], and in shared memory C and L^-1 - I [64, 64], as `through_factor` has it. Z, U: tiles in shared memory; T: that
    of the chunk; root [64]: by rows of a square."""
    K: gl.constexpr = dZ.shape[1]
    SQUARE: gl.constexpr = halves_layout(gl.num_warps(), 64)
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    lifted = root[:, None] * gl.load(T + i * 64 + j)
    factors = new_tile(2, 64, 64)
    store_two(factors, lifted)
    squares = new_tile(2, 64, 64)
    C, change = squares.index(0), squares.index(1)
    change.store((lifted - gl.where(i == j, 1.0, 0.0)).to(TYPE))
    grads = new_tile(1, 64, K).index(0)
    grads.store(dZ.to(TYPE))
    show_to_products()
    below = warpgroup_mma(grads, Z.permute((1, 0)), none, use_acc=False, is_async=True)
    above = warpgroup_mma(Z, grads.permute((1, 0)), none, use_acc=False, is_async=True)
    dW = warpgroup_mma(change.permute((1, 0)), grads, dZ, is_async=True)
    below, above = warpgroup_mma_wait(1, deps=[below, above])
    overlaps = gl.where(i > j, below, gl.where(i < j, above, below))
    pairs = new_tile(2, 64, 64)
    store_two(pairs, overlaps)
    dW = warpgroup_mma_wait(0, deps=[dW])
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
    C.store((-gl.where(i < j, found, gl.where(i == j, 0.5 * found, 0.0))).to(TYPE))  # it is symmetric
    show_to_products()
    dW = warpgroup_mma(C, U, dW, is_async=True)
    dW = warpgroup_mma_wait(0, deps=[dW])
    return dW, C, change


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
    WIDE: gl.constexpr = halves_layout(WARPS, K)
    SQUARE: gl.constexpr = halves_layout(WARPS, 64)
    WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
    number = m.to(gl.int64) * HV + head
    given = load_tile_rows(dy, first, count, head, HV, 1, K).to(gl.float32)
    rows = load_tile_rows(R, first, count, head, HV, 1, K)
    answers = load_tile_rows(b, first, count, head, HV, HEADS_B, K)
    tokens = load_tile_rows(u, first, count, head, HV, HEADS, K)
    down = new_tile(2, 64, K)
    store_two(down, given)
    Z, B, U = new_tile(1, 64, K).index(0), new_tile(1, 64, K).index(0), new_tile(1, 64, K).index(0)
    Z.store((rows * load_roots(D, first, count, head, HV, gl.SliceLayout(1, rows.type.layout))[:, None]).to(TYPE))
    B.store(answers)
    U.store(tokens)
    show_to_products()
    none = gl.zeros([64, 64], gl.float32, SQUARE)
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    along_b = warpgroup_mma(B, Z.permute((1, 0)), none, use_acc=False, is_async=True)
    along_dy = warpgroup_mma(down.index(0), Z.permute((1, 0)), none, use_acc=False, is_async=True)
    root = load_roots(D, first, count, head, HV, gl.SliceLayout(1, SQUARE))
    along_b, along_dy = warpgroup_mma_wait(0, deps=[along_b, along_dy])
    scores = new_tile(2, 64, 64)
    scores.index(0).store(gl.where(i >= j, -along_b, 0.0).to(TYPE))
    scores.index(1).store(gl.where(i >= j, -along_dy, 0.0).to(TYPE))
    show_to_products()
    dZ = gl.zeros([64, K], gl.float32, WIDE)
    dZ = warpgroup_mma(scores.index(0).permute((1, 0)), down.index(0), dZ, use_acc=False, is_async=True)
    dZ = warpgroup_mma(scores.index(1).permute((1, 0)), B, dZ, is_async=True)
    dZ = warpgroup_mma_wait(0, deps=[dZ])
    t = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    c = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    gl.store(direct + (first * HV + head) * K + t[:, None] * (HV * K) + c[None, :], dZ, (t < count)[:, None])
    dW, C, change = through_factor_on_chip(dZ, Z, U, T + number * 4096, root)
    lifted = warpgroup_mma(change, U, U.load(WIDE).to(gl.float32), is_async=True)
    found = new_tile(2, 64, K)
    store_two(found, dW)
    keys = new_tile(1, 64, K).index(0)
    lifted = warpgroup_mma_wait(0, deps=[lifted])
    keys.store(lifted.to(TYPE))
    show_to_products()
    r = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
    E = gl.zeros([K, K], gl.float32, WHOLE)
    E = warpgroup_mma(keys.permute((1, 0)), Z, E, use_acc=False, is_async=True)
    E = warpgroup_mma_wait(0, deps=[E])
    gl.store(transition + number * (K * K) + r * K + c, (-E).to(TYPE))
    N = gl.zeros([K, K], gl.float32, WHOLE)
    for k in gl.static_range(2):
        part, other = down.index(1 - k), found.index(1 - k)
        N = warpgroup_mma(part.permute((1, 0)), B, N, is_async=True)
        N = warpgroup_mma(B.permute((1, 0)), part, N, is_async=True)
        N = warpgroup_mma(other.permute((1, 0)), U, N, is_async=True)
        N = warpgroup_mma(U.permute((1, 0)), other, N, is_async=True)
    N = warpgroup_mma_wait(0, deps=[N])
    gl.store(written + number * (K * K) + r * K + c, N)


@gluon.jit
def times_matrix(rows, matrix, squares, out, SIGN: gl.constexpr):
    """out + SIGN x A of rows [2, 64, K] and a symmetric matrix A [K, K], both as sums of two; `squares` takes A."""
    K: gl.constexpr = out.shape[1]
    PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, K, gl.SliceLayout(1, PLACES))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, PLACES))[None, :]
    store_two(squares, SIGN * gl.load(matrix + r * K + c))
    show_to_products()
    out = warpgroup_mma(rows.index(1), squares.index(0), out, is_async=True)
    out = warpgroup_mma(rows.index(0), squares.index(1), out, is_async=True)
    out = warpgroup_mma(rows.index(0), squares.index(0), out, is_async=True)
    return warpgroup_mma_wait(0, deps=[out])


@gluon.jit(do_not_specialize=["time"])
def gradients_of_chunk(
    u, refresh, A, R, D, T, adjoint, direct, du, chunks, time, HV: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr
):
    """Arguments as of `finish_gradients`."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = halves_layout(WARPS, K)
    SQUARE: gl.constexpr = halves_layout(WARPS, 64)
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    number = m.to(gl.int64) * HV + head
    t = gl.arange(0, 64, BY_TOKEN)
    added = gl.load(refresh + first + t, t < count, 0.0)
    before = gl.convert_layout(gl.associative_scan(added, 0, add) - added, gl.SliceLayout(1, WIDE))[:, None]
    rows = load_tile_rows(R, first, count, head, HV, 1, K)
    tokens = load_tile_rows(u, first, count, head, HV, HEADS, K)
    t = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    c = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    at, live = (first * HV + head) * K + t[:, None] * (HV * K) + c[None, :], (t < count)[:, None]
    dZ = gl.load(direct + at, live, 0.0)
    Z, U = new_tile(2, 64, K), new_tile(1, 64, K).index(0)
    store_two(Z, rows * load_roots(D, first, count, head, HV, gl.SliceLayout(1, rows.type.layout))[:, None])
    U.store(tokens)
    dZ = times_matrix(Z, adjoint + number * (K * K), new_tile(2, K, K), dZ, -1.0)
    root = load_roots(D, first, count, head, HV, gl.SliceLayout(1, SQUARE))
    dW, C, _ = through_factor_on_chip(dZ, Z.index(0), U, T + number * 4096, root)
    V = warpgroup_mma(C.permute((1, 0)), U, dW, is_async=True)
    scaled = new_tile(1, 64, K).index(0)
    scaled.store((before * U.load(WIDE).to(gl.float32)).to(TYPE))
    V = warpgroup_mma_wait(0, deps=[V])
    both = new_tile(2, 64, K)
    store_two(both, V)
    out = times_matrix(both, A + number * (K * K), new_tile(2, K, K), before * dW, 1.0)
    out = warpgroup_mma(C.permute((1, 0)), scaled, out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    gl.store(du + at, out.to(du.dtype.element_ty), live)
