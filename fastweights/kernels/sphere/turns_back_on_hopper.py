"""`turn_slots_back` in Gluon for Hopper GPUs in 16 bits: four lanes hold the 16 tokens of a slot, a warp 8 slots.

The factors of the x in the A and D of tokens before follow without scans over lanes: the products of all later h with the slot
before token c go from c to c + 1 with the later tokens in lanes, and are then turned over by fours. L is freed of its part along
the slot by the numbers of tokens alone: the part is the product of L at the chunk's end with the slot at its start, times all f,
plus what outputs and tokens of the chunk add.
"""

from __future__ import annotations

from ..runtime.gluon import async_copy, gl, gluon, mma_v2
from .forward import find_edges
from .hopper_slots import (
    LINE,
    ROWS,
    ROWS_OF_16,
    as_groups,
    as_tile,
    copy_vectors,
    find_chunk,
    fours_layout,
    lanes_before,
    parts_layout,
    share,
    shared_layout,
    state_layout,
    tile_layout,
)
from .slot_steps import find_step_again, inverse_squares


@gluon.jit
def store_turned(buffer, a, b, c, d):
    """Four groups [32, 4] to shared memory [32, 16], so that loaded again number j of lane i is what number i of lane j was."""
    FOURS: gl.constexpr = fours_layout(gl.num_warps())
    whole = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 3, 2)).reshape([a.shape[0], 16])
    buffer.store(gl.convert_layout(whole, FOURS, assert_trivial=True))


@gluon.jit
def copy_chunk(
    vectors, grads, products, buffer, v, do, pairs, first, stop, m, chunk, head, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr,
):  # fmt: skip
    """Begin to copy h, the gradients of outputs and the products of h with each other [16, 16]."""
    place, in_head, count = find_chunk(first, stop, m, chunk, head, HV)
    copy_vectors(vectors.index(buffer), v + place * V, count, HV, V)
    copy_vectors(grads.index(buffer), do + place * V, count, HV, V)
    SMALL: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, SMALL))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, SMALL))[None, :]
    at = gl.max_contiguous(gl.multiple_of(row * (K + 16) + K + column, [1, 2]), [1, 2])
    async_copy.async_copy_global_to_shared(products.index(buffer), pairs + in_head * 16 * (K + 16) + at)
    async_copy.commit_group()


@gluon.jit
def load_chunk_numbers(
    q, k, gamma, decay, along, A, D, pairs, at_start, first, stop, m, chunk, head, slot,
    HV: gl.constexpr, K: gl.constexpr, HEADS_K: gl.constexpr, HEADS_GAMMA: gl.constexpr, HEADS_DECAY: gl.constexpr,
):  # fmt: skip
    """As they are in memory: A, D, b, query and key [32, 16], the products of h with the slots at the chunk's start, gamma and
    decay [1, 16], and the product of those slots with the gradient of the chunk's outputs [32]."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    place, in_head, count = find_chunk(first, stop, m, chunk, head, HV)
    row = slot[:, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, TILE))[None, :]
    here = token < count
    in_steps = (in_head * K + row) * 16 + token
    in_keys = place // HEADS_K * K + row + token * (HV // HEADS_K * K)
    gain = gl.load(gamma + place // HEADS_GAMMA + token * (HV // HEADS_GAMMA), here, 0.0)
    d = gain
    if decay is not None:
        d = gl.load(decay + place // HEADS_DECAY + token * (HV // HEADS_DECAY), here, 1.0)
    return (
        gl.load(A + in_steps), gl.load(D + in_steps), gl.load(along + in_steps), gl.load(q + in_keys, here & (row >= 0), 0.0),
        gl.load(k + in_keys, here & (row >= 0), 0.0), gl.load(pairs + in_head * 16 * (K + 16) + token * (K + 16) + row), gain, d,
        gl.load(at_start + in_head * K + slot),
    )  # fmt: skip


@gluon.constexpr_function
def square_place(part, group):
    """Where the square of the tokens of two groups, the first not later, stands among the ten."""
    return (0, 4, 7, 9)[part] + group - part


@gluon.constexpr_function
def factor_place(t, part):
    """Where the factors of x_t for the tokens of a group stand."""
    return 2 * ((t - 1) // 4) * ((t - 1) // 4 + 1) + (t - 1) % 4 * ((t - 1) // 4 + 1) + part


@gluon.jit
def share_all(x):
    """The numbers of each token, in all lanes."""
    groups, found = as_groups(x), ()
    for t in gl.static_range(16):
        found += (share(groups[t // 4], t % 4),)  # type: ignore[assignment]
    return found


@gluon.jit
def store_products(squares, f, w, with_slots, products):
    """h_t.s_(c-1) of a chunk as squares of four c by four t, turned over, from those with the slots at its start."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    g, columns = as_groups(with_slots), ()
    for c in gl.static_range(16):
        columns += (g,)  # type: ignore[assignment]
        if c % 4 == 3:
            for group in gl.static_range(c // 4, 4):
                place = squares[square_place(c // 4, group)]
                store_turned(place, columns[0][group], columns[1][group], columns[2][group], columns[3][group])  # type: ignore[misc]
            columns = ()
        # The place of the first row holds the squares.
        row = as_groups((products.permute((1, 0)) if c == 0 else products).slice(c, 1, 0).load(TILE))
        g = (
            f[c] * g[0] + w[c] * row[0], f[c] * g[1] + w[c] * row[1], f[c] * g[2] + w[c] * row[2],
            f[c] * g[3] + w[c] * row[3],
        )  # fmt: skip


@gluon.jit
def find_factors(f, products):
    """Of every t the products of f between a token before it and t, and what D of that token takes of x_t, see `factor_place`;
    and the products of f from a token to the chunk's end."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    SLOTS: gl.constexpr = 8 * gl.num_warps()
    lane = gl.arange(0, 4, gl.SliceLayout(0, TILE))[None, :]
    none = gl.zeros([SLOTS, 4], gl.float32, TILE)
    until, between, to_D = (none, none, none, none), (), ()
    for t in gl.static_range(1, 17):
        now = ()
        for part in gl.static_range(4):
            product = until[part] * f[t - 1]
            now += (gl.where(lane == (t - 1) % 4, 1.0, product) if part == (t - 1) // 4 else product,)  # type: ignore[assignment]
        until = now  # type: ignore[assignment]
        if t < 16:
            row = as_groups(products.slice(t, 1, 0).load(TILE))
            for part in gl.static_range((t - 1) // 4 + 1):
                between += (until[part],)  # type: ignore[assignment]
                to_D += (until[part] * row[part],)  # type: ignore[assignment]
    return between, to_D, until


@gluon.jit
def find_factors_of_slots(between, squares):
    """What A of the tokens before takes of every x_t."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    found, to_A = (), ()
    for place in gl.static_range(10):
        found += (as_groups(squares[place].load(TILE)),)  # type: ignore[assignment]
    for t in gl.static_range(1, 16):
        for part in gl.static_range((t - 1) // 4 + 1):
            to_A += (between[factor_place(t, part)] * found[square_place(part, t // 4)][t % 4],)  # type: ignore[assignment]
    return to_A


@gluon.jit
def widen(x):
    """x in float32. Of bfloat16 by two instructions for two numbers; the compiler takes five, and would carry every number
    through a loop in a register, before it is widened."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    return x.to(gl.float32)


@gluon.jit
def products_since(f):
    """Of a token the product of f of the lanes before it."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    lane = gl.arange(0, 4, gl.SliceLayout(0, TILE))[None, :]
    found = gl.where(lane == 0, 1.0, lanes_before(f, 1))
    found *= gl.where(lane == 0, 1.0, lanes_before(found, 1))
    return found * gl.where(lane < 2, 1.0, lanes_before(found, 2))


@gluon.jit
def products_from_start(F):
    """Of a token the products of f of the tokens of its group before it, and of all before it."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    SLOTS: gl.constexpr = 8 * gl.num_warps()
    f, since, found = as_groups(F), (), ()
    start = gl.full([SLOTS, 4], 1.0, gl.float32, TILE)
    for i in gl.static_range(4):
        since += (products_since(f[i]),)  # type: ignore[assignment]
        found += (start * since[i],)  # type: ignore[assignment]
        start = share(found[i] * f[i], 3)
    return since, as_tile(found)


@gluon.jit
def follow_slot(F, W, y, z, since):
    """The products of L with the slot before every token, from those with the slot at the start (z) and with every h (y)."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    SLOTS: gl.constexpr = 8 * gl.num_warps()
    lane = gl.arange(0, 4, gl.SliceLayout(0, TILE))[None, :]
    f, written, found = as_groups(F), as_groups(W * y), ()
    start = gl.broadcast(z[:, None], gl.zeros([SLOTS, 4], gl.float32, TILE))[0]
    for i in gl.static_range(4):
        f1 = gl.where(lane == 0, 0.0, lanes_before(f[i], 1))
        own = gl.where(lane == 0, 0.0, lanes_before(written[i], 1))
        own += f1 * lanes_before(own, 1)
        own += f1 * lanes_before(f1, 1) * lanes_before(own, 2)
        found += (own + since[i] * start,)  # type: ignore[assignment]
        start = share(f[i] * found[i] + written[i], 3)
    return found


@gluon.jit
def add_groups(own, factors, x):
    """A tile and the products of two tiles, of which these are groups."""
    groups, found = as_groups(own), ()
    for i in gl.static_range(4):
        found += (groups[i] + factors[i] * x[i],)  # type: ignore[assignment]
    return found


@gluon.jit
def solve_steps(A, D, A_weight, D_weight, to_A, to_D):
    """A and D with what they take of the x of later tokens."""
    of_A, of_D = as_groups(A_weight), as_groups(D_weight)
    for t in gl.static_range(15, 0, -1):
        x = share(of_A[t // 4] * A[t // 4] + of_D[t // 4] * D[t // 4], t % 4)
        later_A, later_D = (), ()
        for part in gl.static_range(4):
            if part <= (t - 1) // 4:
                later_A += (A[part] + to_A[factor_place(t, part)] * x,)  # type: ignore[assignment]
                later_D += (D[part] + to_D[factor_place(t, part)] * x,)  # type: ignore[assignment]
            else:
                later_A += (A[part],)  # type: ignore[assignment]
                later_D += (D[part],)  # type: ignore[assignment]
        A, D = later_A, later_D
    return as_tile(A), as_tile(D)


@gluon.jit(do_not_specialize=["T"])
def slots_back_in_turn(
    q, k, v, gamma, decay, do, d_end, along, first_per_square, A, D, pairs, at_start, states, adjoints, d_start, cu_seqlens,
    T, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, OBJECTIVE: gl.constexpr, HEADS_K: gl.constexpr,
    HEADS_GAMMA: gl.constexpr, HEADS_DECAY: gl.constexpr,
):  # fmt: skip
    """Arguments as of `turn_slots_back`; at_start: see `prepare_turns_back`."""
    TYPE: gl.constexpr = v.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SLOTS: gl.constexpr = 8 * WARPS
    TILE: gl.constexpr = tile_layout(WARPS)
    STATE: gl.constexpr = state_layout(WARPS)
    PARTS: gl.constexpr = parts_layout(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, STATE, 2)
    STATE_SLOT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, STATE))
    SLOT: gl.constexpr = gl.SliceLayout(1, TILE)
    n, head, part = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot = part * SLOTS + gl.arange(0, SLOTS, SLOT)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, STATE)))[:, None, None]
    state_row = part * SLOTS + gl.arange(0, SLOTS, STATE_SLOT)[None, :, None]
    channel = gl.arange(0, V // WARPS, gl.SliceLayout(0, gl.SliceLayout(1, STATE)))[None, None, :]
    in_state = state_row * V + warp * (V // WARPS) + channel
    at = (n.to(gl.int64) * HV + head) * K * V
    token = gl.arange(0, 16, gl.SliceLayout(0, TILE))[None, :]
    vectors = gl.allocate_shared_memory(TYPE, [2, WARPS, 16, V // WARPS], shared_layout(WARPS, V))
    grads = gl.allocate_shared_memory(TYPE, [2, WARPS, 16, V // WARPS], shared_layout(WARPS, V))
    products = gl.allocate_shared_memory(gl.float32, [2, 16, 16], ROWS)
    squares = ()
    for _ in gl.static_range(10):  # tiles of their own, as between stores into one there would be a barrier
        squares += (gl.allocate_shared_memory(gl.float32, [SLOTS, 16], ROWS_OF_16),)  # type: ignore[assignment]
    along_h = gl.allocate_shared_memory(gl.float32, [WARPS, SLOTS, 16], gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0]))
    along_slot = gl.allocate_shared_memory(gl.float32, [WARPS, SLOTS], ROWS)
    reads = gl.allocate_shared_memory(TYPE, [SLOTS, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    turns = gl.allocate_shared_memory(TYPE, [SLOTS, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    kept = gl.allocate_shared_memory(gl.float32, [SLOTS], LINE)
    freed = gl.allocate_shared_memory(gl.float32, [SLOTS], LINE)
    per_square_first = gl.load(first_per_square + (n * HV + head) * K + slot)[:, None]
    L = (
        gl.zeros([WARPS, SLOTS, V // WARPS], gl.float32, STATE)
        if d_end is None
        else gl.load(d_end + at + in_state).to(gl.float32)
    )
    blocks = ((stop - first + 15) // 16).to(gl.int32)
    if blocks == 0:
        if d_start is not None:
            gl.store(d_start + at + in_state, L)
        return
    last = gl.maximum(blocks - 2, 0)
    copy_chunk(vectors, grads, products, 0, v, do, pairs, first, stop, m, blocks - 1, head, HV, K, V)
    copy_chunk(vectors, grads, products, 1, v, do, pairs, first, stop, m, last, head, HV, K, V)
    numbers = load_chunk_numbers(
        q, k, gamma, decay, along, A, D, pairs, at_start, first, stop, m, blocks - 1, head, slot, HV, K, HEADS_K, HEADS_GAMMA,
        HEADS_DECAY,
    )  # fmt: skip
    S = widen(gl.load(states + ((m + blocks - 1) * HV + head) * K * V + in_state))
    async_copy.wait_group(1)
    gl.thread_barrier()
    for step in range(0, blocks):
        # Between two barriers all of the chunk in shared memory is read, and after the first its place is free.
        chunk, buffer = blocks - 1 - step, step % 2
        h, grad_o, inner = vectors.index(buffer), grads.index(buffer), products.index(buffer)
        in_head = (m + chunk) * HV + head
        left_operand = L.to(TYPE)
        gl.store(adjoints + in_head * K * V + in_state, left_operand)
        left_operand = gl.convert_layout(left_operand, LEFT, assert_trivial=True)
        none = gl.zeros([WARPS, SLOTS, 16], gl.float32, STATE)
        along_h.store(mma_v2(left_operand, h.permute((0, 2, 1)).load(RIGHT), none))
        along_slot.store(gl.sum(L * S, 2))
        of_reads, of_turns = grad_o.load(RIGHT), h.load(RIGHT)
        # All that does not need L.
        own_A, own_D, b, query, key, with_slots, gain, d, own = numbers
        per_square = inverse_squares(per_square_first, token, chunk == 0)
        square = inner.slice(0, 1, 0).load(TILE)
        F, W, _error, _gain, _d, _inverse, _across, A_weight, D_weight = find_step_again(
            key, gain, None if decay is None else d, b, per_square, square, OBJECTIVE, TYPE
        )
        f, w = share_all(F), share_all(W)
        store_products(squares, f, w, with_slots, inner)
        between, to_D, until = find_factors(f, inner)
        since, from_start = products_from_start(F)
        whole = gl.sum(gl.where(token == 15, from_start * F, 0.0), 1)
        y = gl.convert_layout(gl.sum(along_h.load(PARTS), 0), TILE, assert_trivial=True)
        z = gl.sum(along_slot.load(gl.SliceLayout(2, PARTS)), 0)
        z = gl.convert_layout(z, SLOT, assert_trivial=True)
        to_A = find_factors_of_slots(between, squares)
        # What the chunks before need is on its way while the steps are solved.
        copy_chunk(
            vectors, grads, products, buffer, v, do, pairs, first, stop, m, gl.maximum(chunk - 2, 0), head, HV, K, V
        )  # fmt: skip
        before = gl.maximum(chunk - 1, 0)
        numbers = load_chunk_numbers(
            q, k, gamma, decay, along, A, D, pairs, at_start, first, stop, m, before, head, slot, HV, K, HEADS_K, HEADS_GAMMA,
            HEADS_DECAY,
        )  # fmt: skip
        next_S = gl.load(states + ((m + before) * HV + head) * K * V + in_state)
        A_t, D_t = add_groups(own_A, until, follow_slot(F, W, y, z, since)), add_groups(own_D, until, as_groups(y))
        A_t, D_t = solve_steps(A_t, D_t, A_weight, D_weight, to_A, to_D)
        here = (in_head * K + slot[:, None]) * 16 + token
        gl.store(A + here, A_t)
        gl.store(D + here, D_t)
        turned = from_start * (A_weight * A_t + D_weight * D_t)
        reads.store((from_start * F * query.to(gl.float32)).to(TYPE))
        turns.store(turned.to(TYPE))
        kept.store(whole)
        freed.store(whole * z + own + gl.sum(turned * with_slots, 1))
        async_copy.wait_group(1)
        gl.thread_barrier()
        L *= kept.load(STATE_SLOT)[None, :, None]
        L -= freed.load(STATE_SLOT)[None, :, None] * S
        zeros = gl.zeros([WARPS, SLOTS, 16], TYPE, LEFT)
        L = mma_v2(gl.broadcast(reads.load(gl.SliceLayout(0, LEFT))[None, :, :], zeros)[0], of_reads, L)
        L = mma_v2(gl.broadcast(turns.load(gl.SliceLayout(0, LEFT))[None, :, :], zeros)[0], of_turns, L)
        S = widen(next_S)
    async_copy.wait_group(0)
    if d_start is not None:
        gl.store(d_start + at + in_state, L)
