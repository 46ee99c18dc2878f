"""The gradients of a sequence's tokens, from the last block to the first, in Gluon for Hopper GPUs in 16 bits:
`pass_gradients` with fewer barriers. See the derivation in __init__.py.

The state's gradient L^T [V, K] stays in registers. A tile [V, 16] has the layout of a product's result where it is loaded,
where it is the left operand of the next product, and where it is stored, so that it never changes places. What a block reads
is loaded while the block after it is computed. Numbers of tokens go through shared memory: sums over V, and what follows.
"""

from __future__ import annotations

from ..common.hopper_tiles import as_left, copy_rows, product_layout, show_to_products
from ..common.math import to_float_or_nan
from ..common.packing import pieces_of_sequence, tokens_of_sequence
from ..runtime.gluon import async_copy, gl, gluon, warpgroup_mma, warpgroup_mma_wait

LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TOKENS = gl.constexpr(16)  # of a block
CHUNK = gl.constexpr(64)


@gluon.jit
def nearest_tf32(x):
    return ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)


@gluon.jit
def add_two(a, b, c, d):
    return a + c, b + d


@gluon.jit
def times_floats(x, highs, rests, out):
    """out + x m^T in the precision of float32: x [V, 16] in registers, m [16, 16] as two numbers of tf32 in shared memory, its
    columns ordered as `as_left` orders those of x."""
    high = nearest_tf32(x)
    rest = as_left(x - high)
    high = as_left(high)
    out = warpgroup_mma(rest, highs.permute((1, 0)), out, is_async=True)
    out = warpgroup_mma(high, rests.permute((1, 0)), out, is_async=True)
    out = warpgroup_mma(high, highs.permute((1, 0)), out, is_async=True)
    out, rest, high = warpgroup_mma_wait(0, deps=[out, rest, high])
    return out


@gluon.jit
def store_as_two(highs, rests, x):
    high = nearest_tf32(x)
    highs.store(high)
    rests.store(x - high)


@gluon.jit
def new_square():
    return gl.allocate_shared_memory(
        gl.float32, [TOKENS, TOKENS], gl.NVMMASharedLayout.get_default_for([TOKENS, TOKENS], gl.float32)
    )


@gluon.jit
def new_line(SIZE: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [SIZE], LINE)


@gluon.jit
def load_column_tile(x, t, stop, head, HV: gl.constexpr, V: gl.constexpr, LAYOUT: gl.constexpr):
    """[V, 16] of a tensor [BT, HV, V] from token t on: tokens are columns."""
    row = gl.arange(0, V, gl.SliceLayout(1, LAYOUT))[:, None]
    i = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    return gl.load(x + (t * HV + head) * V + row + i[None, :] * (HV * V), (t + i < stop)[None, :], 0.0)


@gluon.jit
def load_numbers(gamma, kept, t, stop, head, HV: gl.constexpr, HEADS_GAMMA: gl.constexpr):
    """Of the tokens of a block [16]: gamma, r, p, r^3 and 3 p r^2."""
    i = gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    here = t + i < stop
    gain = to_float_or_nan(gl.load(gamma + (t + i) * (HV // HEADS_GAMMA) + head // HEADS_GAMMA, here, 0.0))
    at = kept + ((t + i) * HV + head) * 4
    r, p = gl.load(at, here, 0.0), gl.load(at + 1, here, 0.0)
    return gain, r, p, gl.load(at + 2, here, 0.0), gl.load(at + 3, here, 0.0)


@gluon.jit
def load_systems(through, turned, systems, system):
    """M and N [16, 16], their columns ordered as `as_left` does, and the solution [32, 32]: of rows and columns those of z come
    first, then those of v."""
    WARPS: gl.constexpr = gl.num_warps()
    SMALL: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    i = gl.arange(0, TOKENS, gl.SliceLayout(1, SMALL))[:, None]
    c = gl.arange(0, TOKENS, gl.SliceLayout(0, SMALL))[None, :]
    small = system * 256 + i * TOKENS + c // 8 * 8 + c % 4 * 2 + c // 4 % 2
    r = gl.arange(0, 32, gl.SliceLayout(1, LANES))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, LANES))[None, :]
    large = system * 1024 + (r % 16 * 2 + r // 16) * 32 + lane % 16 * 2 + lane // 16
    return gl.load(through + small), gl.load(turned + small), gl.load(systems + large)


@gluon.jit(do_not_specialize=["T"])
def token_gradients_in_turn(
    q, k, v, gamma, do, d_end, answers, kept, du, through, turned, systems, dz, dv, dgamma, states, d_start, cu_seqlens, T,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS_K: gl.constexpr, HEADS_GAMMA: gl.constexpr,
):  # fmt: skip
    """Arguments as of `pass_gradients`."""
    WARPS: gl.constexpr = gl.num_warps()
    TYPE: gl.constexpr = k.dtype.element_ty
    WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
    TALL: gl.constexpr = product_layout(WARPS, TOKENS, 16)
    TALL_FLOATS: gl.constexpr = product_layout(WARPS, TOKENS, 8)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TALL_FLOATS)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    K_ROW: gl.constexpr = HV // HEADS_K * K
    n, head = gl.program_id(0), gl.program_id(1)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    stop = first + count
    low, _chunks = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
    m = low.to(gl.int64)
    at = (n.to(gl.int64) * HV + head) * (K * V)
    keys = gl.allocate_shared_memory(TYPE, [2, TOKENS, K], gl.NVMMASharedLayout.get_default_for([TOKENS, K], TYPE))
    queries = gl.allocate_shared_memory(TYPE, [CHUNK, K], gl.NVMMASharedLayout.get_default_for([CHUNK, K], TYPE))
    grad_o = gl.allocate_shared_memory(TYPE, [CHUNK, V], gl.NVMMASharedLayout.get_default_for([CHUNK, V], TYPE))
    # Tiles of their own, as between stores into one there would be a barrier.
    M_high, M_rest, N_high, N_rest = new_square(), new_square(), new_square(), new_square()
    lines = (new_line(16), new_line(16), new_line(16), new_line(16), new_line(16), new_line(16))
    sums, found = new_line(32), new_line(32)
    row = gl.arange(0, V, gl.SliceLayout(1, WHOLE))[:, None]
    column = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
    L = gl.zeros([V, K], gl.float32, WHOLE) if d_end is None else gl.load(d_end + at + column * V + row).to(gl.float32)
    if count == 0:
        if d_start is not None:
            gl.store(d_start + at + column * V + row, L)
        return
    blocks = ((count + TOKENS - 1) // TOKENS).to(gl.int32)
    t = first + (blocks - 1) * TOKENS
    copy_rows(keys.index(0), k + (t * (HV // HEADS_K) + head // HEADS_K) * K, stop - t, K_ROW, True)
    async_copy.commit_group()
    Z = load_column_tile(answers, t, stop, head, HV, V, TALL_FLOATS)
    values = load_column_tile(v, t, stop, head, HV, V, TALL_FLOATS)
    D = load_column_tile(du, t, stop, head, HV, V, TALL)
    gain, r, p, cubed, turn = load_numbers(gamma, kept, t, stop, head, HV, HEADS_GAMMA)
    system = (m * 4 + blocks - 1) * HV + head
    M, N, solution = load_systems(through, turned, systems, system)
    for step in range(0, blocks):
        block = blocks - 1 - step
        store_as_two(M_high, M_rest, M)
        store_as_two(N_high, N_rest, N)
        lines[0].store(gain * turn)
        lines[1].store(gain * cubed)
        lines[2].store(gain * p)
        lines[3].store(gain * r)
        lines[4].store(r)
        lines[5].store(p)
        async_copy.wait_group(0)
        show_to_products()
        if (step == 0) | (block % 4 == 3):
            begin = first + block // 4 * CHUNK
            copy_rows(queries, q + (begin * (HV // HEADS_K) + head // HEADS_K) * K, stop - begin, K_ROW, True)
            copy_rows(grad_o, do + (begin * HV + head) * V, stop - begin, HV * V, True)
            state = ((m + block // 4) * HV + head) * (K * V)
            gl.store(states + state + column * V + row, L.to(states.dtype.element_ty))
        ahead = gl.where(block > 0, stop, 0)
        before = gl.maximum(t - TOKENS, 0)
        next_keys = k + (before * (HV // HEADS_K) + head // HEADS_K) * K
        copy_rows(keys.index((step + 1) % 2), next_keys, ahead - before, K_ROW, True)
        async_copy.commit_group()
        tile = keys.index(step % 2)
        left = gl.convert_layout(L.to(TYPE), gl.DotOperandLayout(0, TALL, 2))
        D = warpgroup_mma(left, tile.permute((1, 0)), D, is_async=True)
        next_Z = load_column_tile(answers, before, ahead, head, HV, V, TALL_FLOATS)
        next_values = load_column_tile(v, before, ahead, head, HV, V, TALL_FLOATS)
        next_D = load_column_tile(du, before, ahead, head, HV, V, TALL)
        gain, r, p, cubed, turn = load_numbers(gamma, kept, before, ahead, head, HV, HEADS_GAMMA)
        system = gl.maximum(system - HV, 0)
        M, N, next_solution = load_systems(through, turned, systems, system)
        D, left = warpgroup_mma_wait(0, deps=[D, left])

        D = gl.convert_layout(D, TALL_FLOATS, assert_trivial=True)
        D = times_floats(D, M_high, M_rest, gl.zeros([V, TOKENS], gl.float32, TALL_FLOATS))
        wanted = values.to(gl.float32)
        by_answer, by_value = gl.reduce((Z * D, wanted * D), 0, add_two)
        sums.slice(0, 16).store(by_answer)
        sums.slice(16, 16).store(by_value)
        gl.thread_barrier()
        dots = sums.load(gl.SliceLayout(0, LANES))
        found.store(gl.sum(solution * dots[None, :], 1))
        along, aside = lines[0].load(COLUMN), lines[1].load(COLUMN)
        of_answer, of_value = lines[2].load(COLUMN), lines[3].load(COLUMN)
        i = gl.arange(0, TOKENS, COLUMN)
        root, other = lines[4].load(COLUMN), lines[5].load(COLUMN)
        gl.thread_barrier()
        answer_dot, value_dot = found.slice(0, 16).load(COLUMN), found.slice(16, 16).load(COLUMN)
        along = along * answer_dot - aside * value_dot
        aside *= answer_dot
        X = Z * along[None, :] - wanted * aside[None, :]
        D = times_floats(X, N_high, N_rest, D)
        d_answer = X - D * of_answer[None, :]
        d_value = D * of_value[None, :] - Z * aside[None, :]
        left = gl.convert_layout(
            gl.convert_layout(d_answer, TALL, assert_trivial=True).to(TYPE), gl.DotOperandLayout(0, WHOLE, 2)
        )
        L = warpgroup_mma(left, tile, L, is_async=True)
        live = (t + i < stop)[None, :]
        channel = gl.arange(0, V, gl.SliceLayout(1, TALL_FLOATS))[:, None]
        places = (t * HV + head) * V + channel + i[None, :] * (HV * V)
        gl.store(dz + places, (-d_answer).to(dz.dtype.element_ty), live)
        gl.store(dv + places, d_value.to(dv.dtype.element_ty), live)
        d_gain = root * value_dot - other * answer_dot
        gl.store(dgamma + (t + i) * HV + head, d_gain.to(dgamma.dtype.element_ty), t + i < stop)
        L, left = warpgroup_mma_wait(0, deps=[L, left])
        if block % 4 == 0:
            async_copy.wait_group(0)
            show_to_products()
            L = warpgroup_mma(grad_o.permute((1, 0)), queries, L, is_async=True)
            L = warpgroup_mma_wait(0, deps=[L])
        Z, values, D, solution = next_Z, next_values, next_D, next_solution
        t -= TOKENS
        gl.thread_barrier()  # no warp reads this block's tiles any more
    async_copy.wait_group(0)
    if d_start is not None:
        gl.store(d_start + at + column * V + row, L)
