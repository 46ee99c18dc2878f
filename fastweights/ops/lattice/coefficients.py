"""Steps whose h is known beforehand (encode, similarity): slots as coefficients of their start and of the chunk's h.

Inside a chunk every slot is s = p s_start + sum_t r_t h_t. What a step needs of it, b = s.h, follows for every h to come the
recursion of the slot itself (b' = f b + w h_t.h), so token by token only numbers are carried. Their first values s_start.h
and the products h_t.h are two matrix products per chunk; outputs and the slots at the chunk's end are matrix products again.
The backward pass is the same idea for the gradient in the slots, as coefficients of h and of the output's gradient.

Rows: G = sequences x heads that pass a chunk together; C tokens per chunk; K slots of V numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .slots import Turns, turn
from .workspace import BackwardSpace, ForwardSpace, Workspace

LARGEST = 16.0


class Coefficients(torch.autograd.Function):
    """One chunk: q, write [G,C,K], h [G,C,V], shrink [G,C,K] or None, decay [G,C,1], slots [G,K,V] of length 1 (or 0, where
    write and shrink must be 0), length [G,1,K], which is 1 after a token.

    A step is a = (write - shrink b) / length^2. Returns o [G,C,V], the slots and their length at the end, and whether this
    holds [G]: not where coefficients came to more than LARGEST, of which little but rounding would cancel to slots of length
    1 (long steps along an h that a slot is close to). Such rows take no part in the gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, h: Tensor, write: Tensor, shrink: Tensor | None, decay: Tensor, slots: Tensor, length: Tensor,
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        G, C, K = q.shape
        space = workspace.get(ForwardSpace, q, G, C, K)
        a, shrink = divide_first(write, length), None if shrink is None else divide_first(shrink, length)
        torch.bmm(h, slots.mT, out=space.b)
        torch.bmm(h, h.mT, out=space.overlap)
        shrinks = [None] * C if shrink is None else shrink.unbind(1)
        given = (a, decay, decay.square(), h.square().sum(-1, keepdim=True))
        for views, a_t, d, d2, h2, shrink_t in zip(space.tokens, *(x.unbind(1) for x in given), shrinks):
            (b, f, w), (f_row, w_row), (b_later, overlap), (kept_before, kept, kept_now) = views
            if shrink_t is not None:
                a_t.addcmul_(shrink_t, b, value=-1)
            turn(b, a_t, d2, h2, w, space.inverse)
            torch.addcmul(d, a_t, b, value=-1, out=f).mul_(space.inverse)
            b_later.mul_(f_row).addcmul_(w_row, overlap)
            torch.mul(kept_before, f_row, out=kept)
            kept_now.copy_(w)
        scores = (q.transpose(0, 1)[:, :, None] @ space.kept.mT)[:, :, 0].transpose(0, 1)
        from_start = space.f.cumprod(1)
        o = scores @ h + (q * from_start) @ slots
        end = from_start[:, -1, :, None] * slots + space.kept[-1].mT @ h
        end /= end.norm(dim=-1, keepdim=True).clamp_min(0.5)
        written = space.kept.abs().amax((0, 3)) * h.norm(dim=-1)
        holds = (written.amax(-1) <= LARGEST) & (from_start.abs().amax((1, 2)) <= LARGEST)
        ctx.workspace = workspace
        found = (x.masked_fill(~holds[:, None, None], 0.0) for x in (space.b, a, end))
        ctx.save_for_backward(q, h, shrink, decay, slots, length, *found)
        ctx.mark_non_differentiable(holds)
        return o, end, torch.ones_like(length), holds

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_end: Tensor, d_length: Tensor, d_holds: None) -> tuple[Tensor | None, ...]:
        q, h, shrink, decay, slots, length, b, a, end = ctx.saved_tensors
        G, C, K = q.shape
        space = ctx.workspace.get(BackwardSpace, q, G, C, K, h.shape[-1])
        inner, weights, last = space.inner, space.weights, space.last
        turns = Turns(b, a, decay, h.square().sum(-1, keepdim=True))
        f, w = turns.f[:, :, None].unbind(1), turns.w.unbind(1)
        d_end = d_end - end * (d_end * end).sum(-1, keepdim=True)

        # What slots are read with, two columns a state: the h of the token that follows it, the output's gradient of the one
        # before it. The last state has no h: its column stands for the gradient in the slots at the end.
        space.reads[:, :-1, 0], space.reads[:, 1:, 1] = h, do
        reads = space.reads.flatten(1, 2)
        torch.bmm(h, reads.mT, out=space.overlap)
        overlap_end = (h @ d_end.mT).unbind(1)

        # inner[s]: products of the slots at state s with the columns from s on.
        torch.bmm(reads, slots.mT, out=inner[0])
        torch.sum(slots * d_end, -1, out=inner[0][:, last])
        for (before, after, after_last, overlap), f_t, w_t, end_t in zip(space.inner_tokens, f, w, overlap_end):
            torch.mul(before, f_t, out=after).addcmul_(w_t[:, None], overlap)
            after_last.addcmul_(w_t, end_t)

        # weights[s]: coefficients of the gradient in the slots at state s, of the columns from s on; that of an h is db.
        weights[C, :, last] = 1
        of_A, of_D = turns.d_b_factors(shrink)
        A, D = torch.empty_like(q), torch.empty_like(q)
        given = (*(x.unbind(1) for x in (q, of_A, of_D, A, D)), overlap_end, [*f[1:], None])
        for views, q_t, of_A_t, of_D_t, A_t, D_t, end_t, f_next in reversed(list(zip(space.weight_tokens, *given))):
            (later, now_later, now_read), (now, now_last, db), (inner_t, product, overlap) = views
            if f_next is not None:
                torch.mul(later, f_next, out=now_later)
            now_read.copy_(q_t)
            torch.sum(torch.mul(now, inner_t, out=product), 1, out=A_t)
            torch.addcmul(torch.bmm(overlap, now)[:, 0], now_last, end_t, out=D_t)
            torch.mul(of_A_t, A_t, out=db).addcmul_(of_D_t, D_t)
        torch.mul(weights[1][:, 2:], f[0], out=weights[0][:, 2:])

        E = turns.f * A + turns.w * D
        da = turns.d_a(A, D, E)
        n = -2 * a[:, :1] * da[:, :1] / length
        d_write = divide_first(da, length)
        scores = (turns.w.transpose(0, 1)[:, :, None] @ weights[1:].mT)[:, :, 0].transpose(0, 1)
        dh = scores @ reads + scores[:, :, :last:2].mT @ h + weights[0][:, :last:2] @ slots + 2 * turns.d_square(E) * h
        dh += (turns.w * weights[1:, :, last].transpose(0, 1)) @ d_end
        dq = inner.unflatten(2, (C + 1, 2))[1:, :, 1:, 1].diagonal(dim1=0, dim2=2).mT.clone()
        d_slots = weights[0].mT @ reads + weights[0][:, last, :, None] * d_end
        return dq, dh, d_write, None if shrink is None else -d_write * b, turns.d_d(A, D), d_slots, n, None


def divide_first(x: Tensor, length: Tensor) -> Tensor:
    """A copy of x [G,C,K] whose first token is divided by length^2."""
    return torch.cat([x[:, :1] / length.square(), x[:, 1:]], 1)
