"""`turn_slots` in Gluon for Hopper GPUs in 16 bits: chunks of 16 tokens, four lanes per slot, see hopper_slots.py.

The slots stay in registers. Their length is found together with their products with the h of a chunk, which it divides.
"""

from __future__ import annotations

from ..common.math import to_float_or_nan
from ..runtime.gluon import async_copy, gl, gluon, mma_v2
from .forward import LEAST_DECAY, SHORTEST, bound_below, find_edges, inverse_square, slots_per_program
from .hopper_slots import (
    LINE,
    ROWS,
    as_groups,
    as_tile,
    copy_vectors,
    find_chunk,
    parts_layout,
    share,
    shared_layout,
    state_layout,
    tile_layout,
)
from .slot_steps import split_in_two
from .slot_turns import BLOCK, find_step


@gluon.jit
def gram_place(row, column):
    """Where `inner_products` puts the product of two tokens of a chunk."""
    return row * BLOCK + column % 8 * 4 + column // 8


@gluon.jit
def copy_chunk(vectors, products, buffer, v, gram, first, stop, m, chunk, head, HV: gl.constexpr, V: gl.constexpr):
    """Begin to copy h, and their products with each other [16, 16]."""
    place, in_head, count = find_chunk(first, stop, m, chunk, head, HV)
    copy_vectors(vectors.index(buffer), v + place * V, count, HV, V)
    SINGLE: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, SINGLE))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, SINGLE))[None, :]
    async_copy.async_copy_global_to_shared(
        products.index(buffer), gram + in_head * 16 * BLOCK + gram_place(row, column)
    )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def load_chunk_numbers(
    k, gamma, decay, gram, first, stop, m, chunk, head, slot, HV: gl.constexpr, K: gl.constexpr, HEADS_K: gl.constexpr,
    HEADS_GAMMA: gl.constexpr, HEADS_DECAY: gl.constexpr,
):  # fmt: skip
    """As they are in memory: keys [32, 16], gamma, decay and |h|^2 [1, 16]."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    place, in_head, count = find_chunk(first, stop, m, chunk, head, HV)
    token = gl.arange(0, 16, gl.SliceLayout(0, TILE))[None, :]
    row, here = slot[:, None], token < count
    gain = gl.load(gamma + place // HEADS_GAMMA + token * (HV // HEADS_GAMMA), here, 0.0)
    d = gain
    if decay is not None:
        d = gl.load(decay + place // HEADS_DECAY + token * (HV // HEADS_DECAY), here, 1.0)
    key = gl.load(k + place // HEADS_K * K + row + token * (HV // HEADS_K * K), here & (row >= 0), 0.0)
    square = gl.load(gram + in_head * 16 * BLOCK + gram_place(token, token), here, 0.0)
    return key, gain, d, square


@gluon.jit
def take_steps(key, gain, d, square, b, rows, OBJECTIVE: gl.constexpr, TYPE: gl.constexpr):
    """f, w and b of a chunk's tokens in groups, from the products b of the h with the slots at its start; the coefficients of the
    h at its end, the largest that each had, the product of all f, and the largest product."""
    TILE: gl.constexpr = tile_layout(gl.num_warps())
    SLOTS: gl.constexpr = 8 * gl.num_warps()
    lane = gl.arange(0, 4, gl.SliceLayout(0, TILE))[None, :]
    zeros = gl.zeros([SLOTS, 4], gl.float32, TILE)
    R, most = (zeros, zeros, zeros, zeros), (zeros, zeros, zeros, zeros)
    F, W, p, largest_p = (), (), zeros + 1, zeros
    for t in gl.static_range(16):
        f, w = find_step(key[t // 4], gain[t // 4], d[t // 4], square[t // 4], b[t // 4], OBJECTIVE, TYPE)
        f_t, w_t = share(f, t % 4), share(w, t % 4)
        moved, coefficients, more = (), (), ()
        for group in gl.static_range(4):
            x, r, largest = b[group], R[group], most[group]
            if group > t // 4:
                x = f_t * x + w_t * rows[t][group]
            elif group == t // 4:
                x = gl.where(lane > t % 4, f_t * x + w_t * rows[t][group], x)
                r = gl.where(lane == t % 4, w_t, f_t * r)
            else:
                r *= f_t
            moved += (x,)  # type: ignore[assignment]
            coefficients += (r,)  # type: ignore[assignment]
            more += (gl.maximum(largest, gl.abs(r)) if group <= t // 4 else largest,)  # type: ignore[assignment]
        b, R, most = moved, coefficients, more  # type: ignore[assignment]
        p *= f_t
        largest_p = gl.maximum(largest_p, gl.abs(p))
        if t % 4 == 3:
            F += (f,)  # type: ignore[assignment]
            W += (w,)  # type: ignore[assignment]
    return F, W, b, R, most, p, largest_p


@gluon.jit(do_not_specialize=["T"])
def slots_in_turn(
    k, v, gamma, decay, start, gram, kept, turned, along, states, first_per_square, end, grown, cu_seqlens, T,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, OBJECTIVE: gl.constexpr, HEADS_K: gl.constexpr,
    HEADS_GAMMA: gl.constexpr, HEADS_DECAY: gl.constexpr,
):  # fmt: skip
    """Arguments as of `turn_slots`."""
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
    n, head, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first, stop, m = find_edges(cu_seqlens, n, T)
    slot = tile * SLOTS + gl.arange(0, SLOTS, SLOT)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, STATE)))[:, None, None]
    state_row = tile * SLOTS + gl.arange(0, SLOTS, STATE_SLOT)[None, :, None]
    channel = warp * (V // WARPS) + gl.arange(0, V // WARPS, gl.SliceLayout(0, gl.SliceLayout(1, STATE)))[None, None, :]
    in_state = state_row * V + channel
    at = (n.to(gl.int64) * HV + head) * K * V
    token = gl.arange(0, 16, gl.SliceLayout(0, TILE))[None, :]
    vectors = gl.allocate_shared_memory(TYPE, [2, WARPS, 16, V // WARPS], shared_layout(WARPS, V))
    products = gl.allocate_shared_memory(gl.float32, [2, 16, 16], ROWS)
    along_h = gl.allocate_shared_memory(gl.float32, [WARPS, SLOTS, 16], gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0]))
    squares = gl.allocate_shared_memory(gl.float32, [WARPS, SLOTS], ROWS)
    highs = gl.allocate_shared_memory(TYPE, [SLOTS, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    rests = gl.allocate_shared_memory(TYPE, [SLOTS, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    units, kept_parts = (
        gl.allocate_shared_memory(gl.float32, [SLOTS], LINE), gl.allocate_shared_memory(gl.float32, [SLOTS], LINE)
    )  # fmt: skip
    if start is None:
        S = gl.where(state_row == channel, 1.0, 0.0)
        length = gl.where(slot < V, 1.0, 0.0)
    else:
        S = to_float_or_nan(gl.load(start + at + in_state))
        total = gl.sum(gl.sum(S * S, 2), 0)
        unit = gl.where(total == 0, 0.0, gl.rsqrt(total))
        S *= unit[None, :, None]
        length = total * unit
        length = gl.convert_layout(gl.where((length < SHORTEST) & (total > 0), SHORTEST, length), SLOT)
    per_square = inverse_square(length)
    gl.store(first_per_square + (n * HV + head) * K + slot, per_square)
    alive = gl.where(length == 0, 0.0, 1.0)[:, None]
    # What the gains of the first chunk are multiplied by.
    scale = gl.where(token == 0, per_square[:, None], alive)
    largest = gl.zeros([SLOTS, 4], gl.float32, TILE)
    blocks = ((stop - first + 15) // 16).to(gl.int32)
    if blocks > 0:
        copy_chunk(vectors, products, 0, v, gram, first, stop, m, 0, head, HV, V)
        copy_chunk(vectors, products, 1, v, gram, first, stop, m, gl.minimum(blocks - 1, 1), head, HV, V)
        numbers = load_chunk_numbers(
            k, gamma, decay, gram, first, stop, m, 0, head, slot, HV, K, HEADS_K, HEADS_GAMMA, HEADS_DECAY
        )  # fmt: skip
        async_copy.wait_group(1)
        gl.thread_barrier()
        for chunk in range(0, blocks):
            # Between two barriers all of the chunk in shared memory is read, and after the first its place is free.
            buffer = chunk % 2
            h, inner = vectors.index(buffer), products.index(buffer)
            high, rest = split_in_two(S, TYPE)
            by_channel = h.permute((0, 2, 1)).load(RIGHT)
            none = gl.zeros([WARPS, SLOTS, 16], gl.float32, STATE)
            b = mma_v2(gl.convert_layout(high, LEFT, assert_trivial=True), by_channel, none)
            along_h.store(b - mma_v2(gl.convert_layout(rest, LEFT, assert_trivial=True), by_channel, none))
            squares.store(gl.sum(S * S, 2))
            by_token, rows = h.load(RIGHT), ()
            for t in gl.static_range(16):
                rows += (as_groups(inner.slice(t, 1, 0).load(TILE)),)  # type: ignore[assignment]
            key, gain, d, square = numbers
            key, gain = key.to(gl.float32), to_float_or_nan(gain) * scale
            d = gain * 0 + 1 if decay is None else bound_below(to_float_or_nan(d), LEAST_DECAY)
            own = gl.sum(squares.load(gl.SliceLayout(2, PARTS)), 0)
            own = gl.convert_layout(own, SLOT, assert_trivial=True)
            inverse = gl.where(own == 0, 0.0, gl.rsqrt(own))
            b = gl.convert_layout(gl.sum(along_h.load(PARTS), 0), TILE, assert_trivial=True) * inverse[:, None]
            copy_chunk(
                vectors, products, buffer, v, gram, first, stop, m, gl.minimum(chunk + 2, blocks - 1), head, HV, V
            )  # fmt: skip
            numbers = load_chunk_numbers(
                k, gamma, decay, gram, first, stop, m, gl.minimum(chunk + 1, blocks - 1), head, slot, HV, K, HEADS_K,
                HEADS_GAMMA, HEADS_DECAY,
            )  # fmt: skip
            own_squares = as_groups(square)
            F, W, b, R, most, p, largest_p = take_steps(
                as_groups(key), as_groups(gain), as_groups(d), own_squares, as_groups(b), rows, OBJECTIVE, TYPE
            )  # fmt: skip
            R = as_tile(R)
            high, rest = split_in_two(R, TYPE)
            highs.store(high)
            rests.store(rest)
            units.store(inverse)
            kept_parts.store(gl.max(p, 1))
            place, in_head, count = find_chunk(first, stop, m, chunk, head, HV)
            there, in_steps = token < count, (in_head * K + slot[:, None]) * 16 + token
            gl.store(kept + in_steps, gl.where(there, as_tile(F), 1.0))
            gl.store(turned + in_steps, gl.where(there, as_tile(W), 0.0))
            gl.store(along + in_steps, gl.where(there, as_tile(b), 0.0))
            largest = gl.maximum(largest, largest_p * largest_p)
            for group in gl.static_range(4):
                largest = gl.maximum(largest, most[group] * most[group] * own_squares[group])
            async_copy.wait_group(1)
            gl.thread_barrier()
            S *= units.load(STATE_SLOT)[None, :, None]
            gl.store(states + in_head * K * V + in_state, S.to(states.dtype.element_ty))
            S *= kept_parts.load(STATE_SLOT)[None, :, None]
            zeros = gl.zeros([WARPS, SLOTS, 16], TYPE, LEFT)
            S = mma_v2(gl.broadcast(highs.load(gl.SliceLayout(0, LEFT))[None, :, :], zeros)[0], by_token, S)
            S = mma_v2(gl.broadcast(-rests.load(gl.SliceLayout(0, LEFT))[None, :, :], zeros)[0], by_token, S)
            scale = alive + gl.zeros([SLOTS, 16], gl.float32, TILE)
        async_copy.wait_group(0)
    most_of_all = gl.max(gl.max(largest, 1), 0)
    COUNT: gl.constexpr = SLOTS // slots_per_program(K)
    for i in gl.static_range(COUNT):
        gl.store(grown + ((n * HV + head) * gl.num_programs(2) + tile) * COUNT + i, most_of_all)
    if end is not None:
        total = gl.sum(gl.sum(S * S, 2), 0)
        unit = gl.where(total == 0, 0.0, gl.rsqrt(total))
        unit *= gl.where(blocks == 0, gl.convert_layout(length, STATE_SLOT), 1.0)
        gl.store(end + at + in_state, S * unit[None, :, None])
