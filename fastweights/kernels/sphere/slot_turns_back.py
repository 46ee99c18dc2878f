"""The gradient in the slots, backwards from chunk to chunk. A lane holds one token of one slot.

Inside a chunk the gradient of b of token c, x_c = A_weight A_c + D_weight D_c, is linear in the gradient L at the chunk's end
and in the x of later tokens t. With F the product of f, and A and D at first what slot_outputs_back.py has found of them,

    A_c += F(c+1 .. end) L.s_{c-1} + sum over t > c of F(c+1 .. t-1) s_{c-1}.h_t x_t
    D_c += F(c+1 .. end) L.h_c     + sum over t > c of F(c+1 .. t-1) h_c.h_t x_t

All factors of the x are known beforehand: s_c = f_c s_{c-1} + w_c h_c, so the products of s_{c-1} with a vector are a scan over
lanes. What goes from token to token is one exchange and a few multiplications. At the start of a chunk the part of L along the
slot is taken out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import EVERY, find_edges
from .layout import hide_layout
from .slot_steps import find_step_again, inverse_squares, load_block_rows, load_tokens
from .slot_turns import share_token


@triton.jit
def shift_tokens(x, token, by: tl.constexpr):
    """The number `by` tokens before; of the first tokens that of token 0."""
    return tl.gather(x, tl.broadcast_to(tl.maximum(token - by, 0), x.shape), 1)


@triton.jit
def scan_before_tokens(products, f1, f2, f4, f8, token, LAST: tl.constexpr):
    """The products of a vector with s_{c-1}, for c up to LAST, from those with what token c - 1 writes. f1, f2, ..: the products
    of the 1, 2, .. factors before a token, 0 where they go past the chunk's start."""
    products += f1 * shift_tokens(products, token, 1)
    if LAST > 1:
        products += f2 * shift_tokens(products, token, 2)
    if LAST > 3:
        products += f4 * shift_tokens(products, token, 4)
    if LAST > 7:
        products += f8 * shift_tokens(products, token, 8)
    return products


@triton.jit
def find_factors_before(F, W, token):
    """The products of the 1, 2, 4 and 8 factors before a token, 0 where they go past the chunk's start; w of the token before."""
    f1 = tl.where(token == 0, 0.0, shift_tokens(F, token, 1))
    f2 = f1 * shift_tokens(f1, token, 1)
    f4 = f2 * shift_tokens(f2, token, 2)
    f8 = f4 * shift_tokens(f4, token, 4)
    return f1, f2, f4, f8, tl.where(token == 0, 1.0, shift_tokens(W, token, 1))


@triton.jit
def product_since_start(F, token):
    """The product of f before every token."""
    found = tl.where(token == 0, 1.0, shift_tokens(F, token, 1))
    for level in tl.static_range(4):
        found *= tl.where(token >= 2**level, shift_tokens(found, token, 2**level), 1.0)
    return found


@triton.jit
def change_layout(other, x, always):
    """x [SLOTS, BV], whose layout is that of a product, in the layout of a value that was loaded later. always: a condition
    [SLOTS, BV] that holds where it matters."""
    return tl.trans(tl.where(tl.trans(always), tl.trans(x), tl.trans(other)))


@triton.jit
def load_slot_rows(x, place, token, slot, count, HV: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr):
    """A chunk's numbers of slots [SLOTS, 16], of x [BT, HV // HEADS, K]. Tokens are called contiguous, which they are not, so
    that they lie across lanes; at a divisibility of 1 nothing else follows."""
    offset = slot + token * (HV // HEADS * K)
    offset = tl.multiple_of(tl.max_contiguous(offset, [1, EVERY]), [1, 1])
    return tl.load(x + place // HEADS * K + offset, token < count, 0.0)


@triton.jit
def load_steps_of_chunk(
    q, k, gamma, decay, A, D, pairs, place, in_head, left, token, slot,
    HV: tl.constexpr, K: tl.constexpr, HEADS_K: tl.constexpr, HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr,
):  # fmt: skip
    """As they are in memory: A, D, query, key, gamma, decay and the square of h."""
    in_steps = (in_head * K + slot) * EVERY + token
    gain = load_tokens(gamma, place, token, left, HV, HEADS_GAMMA, 0.0)
    d = gain if decay is None else load_tokens(decay, place, token, left, HV, HEADS_DECAY, 1.0)
    return (
        tl.load(A + in_steps), tl.load(D + in_steps),
        load_slot_rows(q, place, token, slot, left, HV, K, HEADS_K), load_slot_rows(k, place, token, slot, left, HV, K, HEADS_K),
        gain, d, tl.load(pairs + in_head * EVERY * (K + EVERY) + K + token),
    )  # fmt: skip


@triton.jit
def load_pairs(pairs, in_head, token, slot, K: tl.constexpr):
    """The products of every h but the first with the slot at the chunk's start (token 0) or with the h of the token before, and
    with the token's own h."""
    ROW: tl.constexpr = K + EVERY
    pairs += in_head * EVERY * ROW
    with_before = tl.where(token == 0, slot, K + token - 1)
    with_before = tl.multiple_of(tl.max_contiguous(with_before, [1, EVERY]), [1, 1])
    before, own = (), ()
    for t in tl.static_range(1, EVERY):
        before += (tl.load(pairs + t * ROW + with_before),)  # type: ignore[assignment]
        own += (tl.load(pairs + t * ROW + K + token),)  # type: ignore[assignment]
    return before, own


@triton.jit(do_not_specialize=["T"])
def turn_slots_back(
    q, k, v, gamma, decay, do, d_end, along, first_per_square, A, D, pairs, states, adjoints, d_start, cu_seqlens,
    T, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, OBJECTIVE: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_GAMMA: tl.constexpr, HEADS_DECAY: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
    PAIRS_AHEAD: tl.constexpr,
):  # fmt: skip
    """A, D [M, HV, K, 16]: before, what of them comes from the chunk's own outputs. adjoints [M, HV, K, V]: L at the chunk's end.
    d_start: L at the start, still to be divided by the slots' length."""
    n, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = v.dtype.element_ty
    first, stop, m = find_edges(cu_seqlens, n, T)
    # One number per thread, the tokens of a slot in 16 lanes: the layout that Triton gives to loads it may not widen.
    token = tl.multiple_of(tl.arange(0, EVERY)[None, :], [1, 1])
    slot = hide_layout(tl.minimum(part * SLOTS + tl.arange(0, SLOTS), K - 1))[:, None]
    state_row = part * SLOTS + tl.arange(0, SLOTS)[:, None]
    channel = tl.arange(0, BV)[None, :]
    inside = (state_row < K) & (channel < V)
    in_state = state_row * V + channel
    at = (n.to(tl.int64) * HV + head) * K * V
    per_square_first = tl.load(first_per_square + (n * HV + head) * K + slot)
    L = tl.zeros((SLOTS, BV), tl.float32) if d_end is None else tl.load(d_end + at + in_state, inside, 0.0)
    blocks = tl.cdiv((stop - first).to(tl.int32), EVERY)
    # A round goes through one chunk and prepares the one before it, for which all is loaded at its start. The first round goes
    # through no chunk: nothing of it is stored, and f = 1, w = 0 leaves L as it is.
    begin = first + blocks * EVERY
    m += blocks
    none, ones = tl.zeros((SLOTS, EVERY), tl.float32), tl.full((SLOTS, EVERY), 1.0, tl.float32)
    F, from_start, W, A_weight, D_weight, A_t, D_t, until, query = ones, ones, none, none, none, none, none, none, none
    to_A, to_D = (), ()
    for _t in tl.static_range(1, EVERY):
        to_A, to_D = to_A + (none,), to_D + (none,)  # type: ignore[assignment]
    S, h = tl.zeros((SLOTS, BV), dtype), tl.zeros((EVERY, BV), dtype)
    grad_o = h
    rounds = tl.where(blocks > 0, blocks + 1, 0)
    for _block in range(0, rounds):  # Triton 3.5 and 3.8 take `_` for carried through the loop
        is_real = begin < first + blocks * EVERY
        ahead = tl.maximum(begin - EVERY, first)
        before_head = (m - tl.where(begin > first, 1, 0)) * HV + head
        left = tl.minimum(stop - ahead, EVERY).to(tl.int32)
        next_A, next_D, next_query, key, gain, d, square = load_steps_of_chunk(
            q, k, gamma, decay, A, D, pairs, ahead * HV + head, before_head, left, token, slot, HV, K,
            HEADS_K, HEADS_GAMMA, HEADS_DECAY,
        )  # fmt: skip
        if PAIRS_AHEAD:
            pairs_before, pairs_own = load_pairs(pairs, before_head, token, slot, K)
        next_S = tl.load(states + before_head * K * V + in_state, inside, 0.0)
        next_h = load_block_rows(v, ahead, left, head, HV, V, BV)
        next_do = load_block_rows(do, ahead, left, head, HV, V, BV)
        in_head = m * HV + head
        tl.store(adjoints + in_head * K * V + in_state, L.to(dtype), inside & is_real)
        z = tl.sum(L * S.to(tl.float32), 1, keep_dims=True)
        y = tl.trans(tl.dot(h, tl.trans(L.to(dtype)), input_precision=PRECISION))
        b = tl.load(along + (before_head * K + slot) * EVERY + token)
        y = tl.where(token <= EVERY, y, b)  # the layout of what was loaded last, as in `turn_slots`
        z = share_token(tl.broadcast_to(z, (SLOTS, EVERY)), 0)
        f1, f2, f4, f8, w1 = find_factors_before(F, W, token)
        along_L = tl.where(token == 0, z, w1 * shift_tokens(y, token, 1))
        A_t += until * scan_before_tokens(along_L, f1, f2, f4, f8, token, EVERY - 1)
        D_t += until * y
        for t in tl.static_range(EVERY - 1, 0, -1):
            x_t = share_token(A_weight * A_t + D_weight * D_t, t)
            A_t += to_A[t - 1] * x_t
            D_t += to_D[t - 1] * x_t
        in_steps = (in_head * K + slot) * EVERY + token
        stored = (state_row < K) & is_real
        tl.store(A + in_steps, A_t, stored)
        tl.store(D + in_steps, D_t, stored)
        whole = tl.sum(tl.where(token == EVERY - 1, from_start * F, 0.0), 1, keep_dims=True)
        read_here, turned_here = from_start * F * query, from_start * (A_weight * A_t + D_weight * D_t)
        # Of the chunk before, all that does not need L.
        A_t, D_t, query = next_A, next_D, next_query.to(tl.float32)
        per_square = inverse_squares(per_square_first, token, begin <= first + EVERY)
        F, W, _, _, _, _, _, A_weight, D_weight = find_step_again(
            key, gain, None if decay is None else d, b, per_square, square, OBJECTIVE, dtype
        )
        f1, f2, f4, f8, w1 = find_factors_before(F, W, token)
        if not PAIRS_AHEAD:
            pairs_before, pairs_own = load_pairs(pairs, before_head, token, slot, K)
        until, to_A, to_D = none, (), ()
        for t in tl.static_range(1, EVERY):
            until = tl.where(token == t - 1, 1.0, until * share_token(F, t - 1))
            along_h = w1 * pairs_before[t - 1]
            if t > 1:
                along_h = scan_before_tokens(along_h, f1, f2, f4, f8, token, t - 1)
            to_A += (until * along_h,)  # type: ignore[assignment]
            to_D += (until * pairs_own[t - 1],)  # type: ignore[assignment]
        until = tl.where(token == EVERY - 1, 1.0, until * share_token(F, EVERY - 1))
        from_start = product_since_start(F, token)
        written = tl.dot(read_here.to(dtype), grad_o, input_precision=PRECISION)
        written = tl.dot(turned_here.to(dtype), h, written, input_precision=PRECISION)
        S = tl.load(states + tl.where(is_real, in_head, before_head) * K * V + in_state, inside, 0.0).to(tl.float32)
        L = whole * L + change_layout(S, written, inside)
        L -= tl.where(is_real, tl.sum(L * S, 1, keep_dims=True), 0.0) * S
        S, h, grad_o = next_S, next_h, next_do
        begin -= EVERY
        m -= 1
    if d_start is not None:
        tl.store(d_start + at + in_state, L, inside)
