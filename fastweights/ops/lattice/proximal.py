"""Steps with the l1 penalty's proximal step: it takes slots out of the span of what was written, and their length out of the
closed form of slots.py, so that all is done on the slots themselves.

    y = (d - a b) s + a h        z = y - clip(y, -p, p)        s' = z / |z|        length' = length |z|, or 1 if normalised
with p = gamma l1 / length. A slot that z leaves nothing of is gone: length 0, never written again. Layout: see slots.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .slots import SHORTEST, from_rows, inverse, optional_rows, reversed_tokens, to_rows


class Proximal(torch.autograd.Function):
    """One chunk: q, write [G,C,K], v [G,C,V], shrink [G,C,K] or None, decay [G,C,1], slots [G,K,V] of length 1 or 0, length
    [G,1,K], which is 1 or 0 after a token if `normalize`, key [G,C,K] or None, pull [G,C,1].

    A step is a = (write - shrink b) / length^2 with h = v, or h = v - key slots where there is a key; p = pull / length.
    Returns o [G,C,V], the slots and their length at the end."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, v: Tensor, write: Tensor, shrink: Tensor | None, decay: Tensor, slots: Tensor, length: Tensor,
        key: Tensor | None, pull: Tensor, normalize: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        C = q.shape[1]
        q, h, a, d = to_rows(q), to_rows(v), to_rows(write), to_rows(decay)
        pulls, keys, shrinks = to_rows(pull), optional_rows(key, C), optional_rows(shrink, C)
        b, f, p, scale, o = *(torch.empty_like(q) for _ in range(4)), torch.empty_like(h)
        lengths, S = torch.cat([length[None], torch.empty_like(q)]), slots
        tokens = zip(q, h, a, a.mT, d, b, f, f.mT, p, p.mT, scale, o, lengths, lengths[1:], pulls, keys, shrinks)
        for views in tokens:
            q_t, h_t, a_t, a_column, d_t, b_t, f_t, f_column, p_t, p_column, scale_t, o_t, n, n_next, *given = views
            pull_t, key_t, shrink_t = given
            if key_t is not None:
                h_t.baddbmm_(key_t, S, alpha=-1)
            torch.bmm(h_t, S.mT, out=b_t)
            if shrink_t is not None:
                a_t.addcmul_(shrink_t, b_t, value=-1)
            per_length = inverse(n)
            a_t.mul_(per_length).mul_(per_length)
            torch.mul(pull_t, per_length, out=p_t)
            torch.addcmul(d_t, a_t, b_t, value=-1, out=f_t)
            S = shrink_slots(S, f_column, a_column, h_t, p_column)
            norm = S.norm(dim=-1)[:, None]
            scale_t.copy_(inverse(norm))
            S *= scale_t.mT
            n_next.copy_(norm > 0 if normalize else (n * norm).clamp_min(SHORTEST) * (norm > 0))
            torch.bmm(q_t.mul_(n_next), S, out=o_t)
        ctx.normalize = normalize
        ctx.save_for_backward(q, h, b, a, f, p, scale, key, shrink, pull, slots, lengths)
        return from_rows(o), S, lengths[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_end: Tensor, d_length: Tensor) -> tuple[Tensor | None, ...]:
        reads, h, b, a, f, p, scale, key, shrink, pull, slots, lengths = ctx.saved_tensors
        C, G, _, K = reads.shape
        do = to_rows(do)
        states = slots.new_empty(C + 1, *slots.shape)
        states[0] = slots
        for S, S_next, scale_column, *of_step in zip(states, states[1:], scale.mT, f.mT, a.mT, h, p.mT):
            torch.mul(shrink_slots(S, *of_step), scale_column, out=S_next)
        d_reads = do @ states[1:].mT

        # As in on_slots.py: rows of what the gradient in the slots takes in on its way back, and the gradient n in log length.
        left, right = slots.new_zeros(C + 1, G, 3, K), slots.new_zeros(C + 1, G, 3, h.shape[-1])
        left[1:, :, 2:], right[1:, :, 2:], right[:-1, :, :1] = reads, do, h
        if key is not None:
            left[:-1, :, 1:2] = -to_rows(key)
        L = torch.baddbmm(d_end, left[C].mT, right[C])
        free = (lengths[1:] > SHORTEST).to(a) * (not ctx.normalize)
        read = torch.cat([torch.zeros_like(reads[:1]), reads * d_reads])
        n = torch.addcmul(read[C], d_length, lengths[C])
        per_length = inverse(lengths[:-1])
        shrinks = [None] * C if shrink is None else to_rows(shrink).mul(per_length.square()).unbind(0)[::-1]

        A, da, dp = (torch.empty_like(a) for _ in range(3))
        steps = reversed_tokens(h, a, b, f.mT, p, scale.mT, free, read[:-1], states[:-1], states[1:])
        found = reversed_tokens(left[:-1].mT, left[:-1, :, :1], right[:-1], right[:-1, :, 1:2], A, da, dp)
        for step, places, shrink_t in zip(steps, found, shrinks):
            h_t, a_t, b_t, f_column, p_t, scale_column, free_t, read_t, S, S_next = step
            left_t, db, right_t, dh_place, A_t, da_t, dp_t = places
            n = n * free_t
            along = (L * S_next).sum(-1, keepdim=True).sub_(n.mT)
            sign = S_next.sign()
            dz = L.addcmul_(S_next, along, value=-1).mul_(scale_column).mul_(sign)
            torch.sum(dz, -1, out=dp_t[:, 0]).neg_()
            dz.mul_(sign)
            torch.sum(dz * S, -1, out=A_t[:, 0])
            torch.addcmul(h_t @ dz.mT, b_t, A_t, value=-1, out=da_t)
            torch.mul(a_t, A_t, out=db).neg_()
            if shrink_t is not None:
                db.addcmul_(shrink_t, da_t, value=-1)
            n.add_(read_t).addcmul_(a_t, da_t, value=-2).addcmul_(p_t, dp_t, value=-1)
            dh_place.copy_(torch.bmm(a_t, dz).baddbmm_(db, S))
            L = dz.mul_(f_column).baddbmm_(left_t, right_t)

        dh = right[:-1, :, 1:2]
        da *= per_length.square()
        d_key = None if key is None else from_rows(-dh @ states[:-1].mT)
        d_shrink = None if shrink is None else from_rows(-da * b)
        d_decay, d_pull = A.sum(-1, keepdim=True), (dp * per_length).sum(-1, keepdim=True)
        dq, dv, d_write, d_decay, d_pull = (from_rows(x) for x in (d_reads * lengths[1:], dh, da, d_decay, d_pull))
        return dq, dv, d_write, d_shrink, d_decay, L, n * per_length[0], d_key, d_pull, None


def shrink_slots(S: Tensor, f: Tensor, a: Tensor, h: Tensor, p: Tensor) -> Tensor:
    """z from S [G,K,V], f, a, p [G,K,1] and h [G,1,V]."""
    y = torch.mul(S, f).addcmul_(a, h)
    return y.sub_(y.clamp(-p, p))
