"""Steps one after the other on the slots themselves: decode, whose h is the error of all slots together, and every objective
without normalisation, where a step depends on the length that its slot has come to.

The slots of a chunk's tokens exist only in the backward pass of that chunk. Rows: G = sequences x heads that pass a
chunk together; C tokens per chunk; K slots of V numbers. Inside, tokens come first and vectors are rows: [C, G, 1, K].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .slots import SHORTEST, Turns, from_rows, optional_rows, reversed_tokens, to_rows, turn


class Sequential(torch.autograd.Function):
    """One chunk: q, write [G,C,K], v [G,C,V], shrink [G,C,K] or None, decay [G,C,1], slots [G,K,V] of length 1 (or 0, where
    write and shrink must be 0), length [G,1,K], which is 1 after a token if `normalize`, key [G,C,K] or None.

    A step is a = (write - shrink b) / length^2 with h = v, or h = v - key slots where there is a key. Returns o [G,C,V],
    the slots and their length at the end."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, v: Tensor, write: Tensor, shrink: Tensor | None, decay: Tensor, slots: Tensor, length: Tensor,
        key: Tensor | None, normalize: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        S, C = slots.clone(), q.shape[1]
        q, h, a, d = to_rows(q), to_rows(v), to_rows(write), to_rows(decay)
        b, w, inverse, kept = (torch.empty_like(q) for _ in range(4))
        square, across, o = torch.empty_like(d[0]), torch.empty_like(S), torch.empty_like(h)
        lengths = torch.cat([length[None], torch.ones_like(q)])
        keys, shrinks = optional_rows(key, C), optional_rows(shrink, C)
        vectors = zip(q, h, h.mT, a, b, w, kept, inverse, o, kept.mT, b.mT, w.mT)
        tokens = zip(vectors, d, d.square(), lengths, lengths[1:], keys, shrinks)
        for vector, d_t, d2, n, n_next, key_t, shrink_t in tokens:
            q_t, h_t, h_column, a_t, b_t, w_t, kept_t, inverse_t, o_t, *columns = vector
            if key_t is not None:
                h_t.baddbmm_(key_t, S, alpha=-1)
            torch.bmm(h_t, h_column, out=square)
            torch.bmm(h_t, S.mT, out=b_t)
            if shrink_t is not None:
                a_t.addcmul_(shrink_t, b_t, value=-1)
            a_t.div_(n).div_(n)
            turn(b_t, a_t, d2, square, w_t, inverse_t)
            torch.mul(d_t, inverse_t, out=kept_t)
            write_slots(S, across, h_t, *columns)
            if not normalize:
                torch.div(n, inverse_t, out=n_next).clamp_min_(SHORTEST)
                q_t.mul_(n_next)
            torch.bmm(q_t, S, out=o_t)
        ctx.normalize = normalize
        ctx.save_for_backward(q, h, b, a, key, shrink, d, slots, lengths)
        return from_rows(o), S, lengths[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_end: Tensor, d_length: Tensor) -> tuple[Tensor | None, ...]:
        reads, h, b, a, key, shrink, d, slots, lengths = ctx.saved_tensors
        C, G, _, K = reads.shape
        do = to_rows(do)
        turns = Turns(b, a, d, h.square().sum(-1, keepdim=True))
        f, w = turns.f, turns.w
        states = slots.new_empty(C + 1, *slots.shape)
        states[0] = slots
        d_reads = torch.empty_like(reads)
        tokens = zip(states, states[1:], f.mT, w.mT, h, do, d_reads)
        for S, S_next, f_column, w_column, h_t, do_t, d_read in tokens:
            normalise_(torch.mul(S, f_column, out=S_next).addcmul_(w_column, h_t))
            torch.bmm(do_t, S_next.mT, out=d_read)

        # Back through a token the gradient in the slots is L <- f L + db h - key dh, and takes in read do of the token before:
        # three columns by three rows. What lies along a slot is taken out at once: it changes nothing, and would grow.
        left, right = slots.new_zeros(C + 1, G, 3, K), slots.new_zeros(C + 1, G, 3, h.shape[-1])
        left[1:, :, 2:], right[1:, :, 2:], right[:-1, :, :1] = reads, do, h
        if key is not None:
            left[:-1, :, 1:2] = -to_rows(key)
        L = torch.baddbmm(d_end, left[C].mT, right[C])
        L -= states[C] * (L * states[C]).sum(-1, keepdim=True)

        # The gradient n in log length goes back as well; where a length is set, to 1 or to SHORTEST, it ends.
        moving = not ctx.normalize
        free = (lengths[1:] > SHORTEST).to(a) * moving
        read = torch.cat([torch.zeros_like(reads[:1]), reads * d_reads])
        n = torch.addcmul(read[C], d_length, lengths[C])
        square = lengths[:-1].square()
        shrinks = [None] * C if shrink is None else (to_rows(shrink) / square).unbind(0)[::-1]

        A, D, N, da, along = (torch.zeros_like(a) for _ in range(5))
        dh, product = torch.empty_like(h[0]), torch.empty_like(slots)
        of_step = reversed_tokens(f, f.mT, w, b, a, turns.inverse, turns.across_a, turns.across_b, free, read[:-1])
        of_slots = reversed_tokens(
            states[:-1], h, left[:-1].mT, left[:-1, :, :1], left[:-1, :, 1:2], right[:-1], right[:-1, :, 1:2]
        )
        found = reversed_tokens(A, A[:, :, 0], D, N, da, along)
        for step, slot, (A_t, A_sum, D_t, N_t, da_t, along_t), shrink_t in zip(of_step, of_slots, found, shrinks):
            f_t, f_column, w_t, b_t, a_t, inverse, across_a, across_b, free_t, read_t = step
            S, h_t, left_t, db, minus_key, right_t, dh_place = slot
            torch.sum(torch.mul(L, S, out=product), -1, out=A_sum)
            torch.bmm(h_t, L.mT, out=D_t)
            torch.addcmul(D_t, b_t, A_t, value=-1, out=da_t).mul_(inverse)
            torch.mul(w_t, A_t, out=db).neg_()
            torch.bmm(w_t, L, out=dh)
            if moving:
                torch.mul(n, free_t, out=N_t)
                da_t.addcmul_(across_a, N_t)
                db.addcmul_(across_b, N_t, value=-1)
                torch.add(N_t, read_t, out=n).addcmul_(a_t, da_t, value=-2)
                dh.addcmul_((w_t.square() * N_t).sum(-1, keepdim=True), h_t)
            if shrink_t is not None:
                db.addcmul_(shrink_t, da_t, value=-1)
            dh_place.copy_(dh.baddbmm_(db, S))
            torch.bmm(dh, S.mT, out=along_t)
            radial = torch.addcmul(read_t, f_t, A_t).addcmul_(db, b_t).addcmul_(minus_key, along_t)
            L.mul_(f_column).baddbmm_(left_t, right_t).addcmul_(S, radial.mT, value=-1)

        if not moving:
            n = -2 * a[0] * da[0]
        da /= square
        d_decay = ((A + d * turns.inverse * N) * turns.inverse).sum(-1, keepdim=True)
        d_key = None if key is None else from_rows(-along)
        d_shrink = None if shrink is None else from_rows(-da * b)
        dq, dv, d_write, d_decay = (from_rows(x) for x in (d_reads * lengths[1:], right[:-1, :, 1:2], da, d_decay))
        return dq, dv, d_write, d_shrink, d_decay, L, n / lengths[0], d_key, None


def write_slots(S: Tensor, across: Tensor, h: Tensor, kept: Tensor, b: Tensor, w: Tensor) -> None:
    """S <- kept S + w (h - b S), with room for what is in brackets; S [G,K,V], h [G,1,V], kept, b, w [G,K,1]."""
    torch.addcmul(h, b, S, value=-1, out=across)
    normalise_(S.mul_(kept).addcmul_(w, across))


def normalise_(S: Tensor) -> None:
    """Bring slots to length 1 once more (a slot of 0 stays 0): in long steps along a slot a wrong length, left by rounding,
    would grow with every token."""
    S.div_(S.norm(dim=-1, keepdim=True).clamp_min_(0.5))
