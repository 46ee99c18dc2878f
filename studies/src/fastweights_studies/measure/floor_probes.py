"""What an exact kernel cannot avoid, one thing per kernel: the steps of a recursion that wait for each other, without loads,
stores or anything that another program could do. floors.py says which sums of these are the floor of which op.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.kernels.common.hopper_tiles import product_layout, show_to_products, token_layout
from fastweights.kernels.inverse_gram.answers import split_into
from fastweights.kernels.inverse_gram.inverse_in_turn import store_three, times_three
from fastweights.kernels.runtime.gluon import HAS_GLUON, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from fastweights.kernels.sphere.decode_steps import dot_over_channels, own_slot, spread_to_tile, sum_own_over_channels
from fastweights.kernels.sphere.layout import slot_and_channel, sum_over_slots
from fastweights.kernels.sphere.slot_steps import inverse_root

__all__ = [
    "carry_adjoint_alone", "carry_matrix_alone", "find_roots", "multiply_in_turn", "undo_slots_alone", "write_slots_alone",
]  # fmt: skip

UNROLLED = tl.constexpr(16)  # steps of a round of a loop


@triton.jit
def load_lane(numbers, i: tl.constexpr):
    """A number per lane that the compiler does not know."""
    return tl.load(numbers + i * 32 + tl.arange(0, 32))


@triton.jit(do_not_specialize=["rounds"])
def find_roots(numbers, out, rounds, KIND: tl.constexpr):
    """Rounds of 16 tokens of one warp. numbers [8, 32]: what a token takes that is known beforehand.

    "answers": of output-normalised TTT |z|^2 and z.v, from those of the token before, through its root.
    "errors", "keys": of a slot of Lattice with objective encode or similarity s.h, from that of the token before.
    """
    c, with_v, with_z, gain = load_lane(numbers, 0), load_lane(numbers, 1), load_lane(numbers, 2), load_lane(numbers, 3)
    square, along = load_lane(numbers, 4), load_lane(numbers, 5)
    first_square, first_along = square, along
    for _ in range(0, rounds):
        for _t in tl.static_range(UNROLLED):
            if KIND == "answers":
                r = inverse_root(square, tl.bfloat16)
                a, b = gain * r, (gain * along * r) * (r * r)
                share = a * with_v - b * with_z
                length = a * (a * with_v - b * along)
                square = first_square + c * (2 * share + c * length)
                along = first_along + c * share
            else:
                # along is b, with_v the key, with_z what s.h of the next token has before this step.
                a = gain * (with_v - along) if KIND == "errors" else gain
                inverse = inverse_root(c + a * a * (square - along * along), tl.bfloat16)
                along = ((c - a * along) * with_z + a * with_v) * inverse
    tl.store(out + tl.program_id(0) * 32 + tl.arange(0, 32), square + along)


@triton.jit(do_not_specialize=["blocks"])
def multiply_in_turn(
    keys, given, out, blocks, ROWS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr
):
    """Of every block of TOKENS tokens the products with a state [ROWS, K] that wait for each other: what the tokens find in it
    and what they write. INNER: between these all inner products of what they find, and what follows from those for all of it.
    keys [TOKENS, K] and given [ROWS, TOKENS] are those of every block, in 16 bits."""
    i, c, row = tl.arange(0, TOKENS), tl.arange(0, K), tl.arange(0, ROWS)
    tile = tl.load(keys + i[:, None] * K + c[None, :])
    wanted = tl.load(given + row[:, None] * TOKENS + i[None, :])
    S = tl.zeros((ROWS, K), tl.float32)
    for _ in range(0, blocks):
        found = tl.dot(S.to(tile.dtype), tl.trans(tile), wanted.to(tl.float32)).to(tile.dtype)
        if INNER:
            products = tl.dot(tl.trans(found), found).to(tile.dtype)
            found = tl.dot(found, products, wanted.to(tl.float32)).to(tile.dtype)
        S = tl.dot(found, tile, S)
    tl.store(out + tl.program_id(0) * ROWS * K + row[:, None] * K + c[None, :], S)


@triton.jit(do_not_specialize=["rounds"])
def write_slots_alone(
    numbers, out, rounds,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr,
):  # fmt: skip
    """Tokens of Lattice's decode objective with slots of length 1, all with the same key, value and rate: three multiply-adds per
    number of the state, a sum over slots, one over channels, a root."""
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, GV, RV)
    own, _copy = own_slot(LK, W, RK)
    neighbour = tl.arange(0, 4)[None, None, None, None, None, :]
    value = tl.load(numbers + (channel * 4 + neighbour) % 128)
    key, rate = tl.load(numbers + own % 128), tl.load(numbers)
    S = value * spread_to_tile(key, RK)
    answer = sum_over_slots(S * spread_to_tile(key, RK))
    for _ in range(0, rounds):
        for _t in tl.static_range(2):
            h = value - answer
            b = sum_own_over_channels(S * h)
            square = dot_over_channels(h, h)
            a = rate * key
            inverse = inverse_root(1.0 + a * a * (square - b * b), tl.bfloat16)
            scale = (1.0 - a * b) * inverse
            S += spread_to_tile(a * inverse, RK) * h
            answer = sum_over_slots(S * spread_to_tile(scale * key, RK))
    tl.store(out + tl.program_id(0) * 32 * W + tl.ravel(thread), tl.ravel(tl.sum(tl.sum(tl.sum(S, 5), 4), 3)))


@triton.jit(do_not_specialize=["rounds"])
def undo_slots_alone(
    numbers, out, rounds,
    LV: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, RK: tl.constexpr, GV: tl.constexpr, RV: tl.constexpr,
):  # fmt: skip
    """The same backward, without the gradients of queries and keys, which another launch may find: the token is undone in S, L h
    and L s are sums over channels, dh is one over slots, and L takes three terms: eight multiply-adds per number."""
    slot, channel, thread = slot_and_channel(LV, LK, W, RK, GV, RV)
    own, _copy = own_slot(LK, W, RK)
    neighbour = tl.arange(0, 4)[None, None, None, None, None, :]
    h = tl.load(numbers + (channel * 4 + neighbour) % 128)
    key, w = tl.load(numbers + own % 128), tl.load(numbers + own % 64)
    S = h * spread_to_tile(key, RK)
    L = S + h
    for _ in range(0, rounds):
        D = sum_own_over_channels(L * h)
        S -= spread_to_tile(w, RK) * h
        A = sum_own_over_channels(L * S)
        E = key * A + w * D
        A -= E * key
        grad_b = spread_to_tile(-w * A, RK)
        of_slots = tl.sum(spread_to_tile(w, RK) * L, 3, keep_dims=True) + tl.sum(grad_b * S, 3, keep_dims=True)
        dh = sum_over_slots(of_slots)
        L += grad_b * h
        L -= spread_to_tile(E * key, RK) * S
        L -= spread_to_tile(key, RK) * dh
    tl.store(out + tl.program_id(0) * 32 * W + tl.ravel(thread), tl.ravel(tl.sum(tl.sum(tl.sum(S + L, 5), 4), 3)))


if HAS_GLUON:

    @gluon.jit(do_not_specialize=["steps"])
    def carry_matrix_alone(tokens, out, steps, K: gl.constexpr, PARTS: gl.constexpr):
        """A <- A - (A U^T) X (U A) for the same 64 tokens in every step, with X what U A U^T gives: of Woodbury's formula the
        four products that wait for each other, as if an inverse took no time. PARTS: bfloat16 numbers that a number in float32
        is a sum of; products of two such numbers have six products, or one."""
        WARPS: gl.constexpr = gl.num_warps()
        WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
        TALL: gl.constexpr = product_layout(WARPS, 64, 16)
        SQUARE: gl.constexpr = token_layout(64, WARPS)
        LEFT: gl.constexpr = gl.DotOperandLayout(0, TALL, 2)
        PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
        TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], gl.bfloat16)
        U = gl.allocate_shared_memory(gl.bfloat16, [64, K], TILE)
        parts = gl.allocate_shared_memory(
            gl.bfloat16, [3, K, 64], gl.NVMMASharedLayout.get_default_for([K, 64], gl.bfloat16)
        )
        square = gl.allocate_shared_memory(
            gl.bfloat16, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
        )
        i = gl.arange(0, 64, gl.SliceLayout(1, PLACES))[:, None]
        j = gl.arange(0, K, gl.SliceLayout(0, PLACES))[None, :]
        U.store(gl.load(tokens + i * K + j))
        r = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
        c = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
        now = gl.where(r == c, 1.0, 0.0)
        nothing = gl.zeros([64, 64], gl.float32, SQUARE)
        show_to_products()
        for _ in range(0, steps):
            bits = split_into(now, PARTS)
            rows = gl.zeros([K, 64], gl.float32, TALL)
            for k in gl.static_range(PARTS):
                left = gl.convert_layout(bits[PARTS - 1 - k], LEFT)
                rows = warpgroup_mma(left, U.permute((1, 0)), rows, is_async=True)
                rows, left = warpgroup_mma_wait(0, deps=[rows, left])
            if PARTS == 3:
                store_three(parts, rows)
            else:
                parts.index(0).store(rows.to(gl.bfloat16))
            show_to_products()
            products = nothing
            for k in gl.static_range(PARTS):
                products = warpgroup_mma(U, parts.index(PARTS - 1 - k), products, is_async=True)
            products = warpgroup_mma_wait(0, deps=[products])
            square.store(products.to(gl.bfloat16))
            show_to_products()
            left = gl.convert_layout(rows.to(gl.bfloat16), LEFT)
            taken = gl.zeros([K, 64], gl.float32, TALL)
            taken = warpgroup_mma(left, square, taken, is_async=True)
            taken, left = warpgroup_mma_wait(0, deps=[taken, left])
            if PARTS == 3:
                now -= times_three(taken, parts, WHOLE, True)
            else:
                left = gl.convert_layout((-taken).to(gl.bfloat16), gl.DotOperandLayout(0, WHOLE, 2))
                now = warpgroup_mma(left, parts.index(0).permute((1, 0)), now, is_async=True)
                now, left = warpgroup_mma_wait(0, deps=[now, left])
            gl.thread_barrier()  # no warp reads the tiles of this step any more
        gl.store(out + gl.program_id(0) * (K * K) + r * K + c, now)

    @gluon.jit(do_not_specialize=["steps"])
    def carry_adjoint_alone(tokens, out, steps, K: gl.constexpr):
        """F <- E^T F E + F for the same E [K, K] in every step: two products in bfloat16 that wait for each other."""
        WARPS: gl.constexpr = gl.num_warps()
        WHOLE: gl.constexpr = product_layout(WARPS, K, 16)
        LEFT: gl.constexpr = gl.DotOperandLayout(0, WHOLE, 2)
        PLACES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
        TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, K], gl.bfloat16)
        E = gl.allocate_shared_memory(gl.bfloat16, [K, K], TILE)
        between = gl.allocate_shared_memory(gl.bfloat16, [K, K], TILE)
        i = gl.arange(0, K, gl.SliceLayout(1, PLACES))[:, None]
        j = gl.arange(0, K, gl.SliceLayout(0, PLACES))[None, :]
        E.store(gl.load(tokens + i * K + j))
        r = gl.arange(0, K, gl.SliceLayout(1, WHOLE))[:, None]
        c = gl.arange(0, K, gl.SliceLayout(0, WHOLE))[None, :]
        now = gl.where(r == c, 1.0, 0.0)
        show_to_products()
        for _ in range(0, steps):
            left = gl.convert_layout(now.to(gl.bfloat16), LEFT)
            half = gl.zeros([K, K], gl.float32, WHOLE)
            half = warpgroup_mma(left, E, half, is_async=True)
            half, left = warpgroup_mma_wait(0, deps=[half, left])
            between.store(half.to(gl.bfloat16))
            show_to_products()
            now = warpgroup_mma(E.permute((1, 0)), between, now, is_async=True)
            now = warpgroup_mma_wait(0, deps=[now])
            gl.thread_barrier()  # no warp reads what is between the products any more
        gl.store(out + gl.program_id(0) * (K * K) + r * K + c, now)
