"""Reading the posterior inside chunks, with a backward that recomputes: the K x V states of a token exist for a few
sub-chunks at a time, forward and backward.

Per token, with I = J + prior, X = M / I, and do, dw the gradients in o and in the variance w:
    o = X^T q             dq = X do + 2 q * (1/I dw)          dM_t = q do^T / I
    w = (1/I)^T q^2       dJ_t = -(q do^T * X) / I - q^2 dw^T / I^2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .memory import Memory

# Numbers held at a time of the states at sub-chunk starts, and of those after every token. On a CPU the latter should fit
# a core's own cache; where there are many cores they want more work at a time.
BOUNDS = 2**20
STATES = {"cpu": 2**18, "other": 2**24}


class ReadInside(torch.autograd.Function):
    """apply(variance, q, k, v, beta, within, over, prior, M, J) -> o and, if `variance`, the variance (else of no column).

    q (scaled), k [n,s,c,K]; v, beta, o [n,s,c,V]; within, over: see memory.py; prior [n]; M, J [n,K,V] at the start of
    every chunk. Rows n are chunk x head."""

    @staticmethod
    def forward(ctx: Any, variance: bool, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.variance = variance
        ctx.save_for_backward(*inputs)
        q, _, v, *_ = inputs
        o, w = v.new_empty(v.shape), v.new_empty(*v.shape[:3], v.shape[3] if variance else 0)
        for rows in blocks(q, v):
            q_, o_, w_ = (x[rows].flatten(0, 1) for x in (q, o, w))
            for part, M, importance in Posterior(*(x[rows] for x in inputs[1:])).parts():
                read(q_[part], M.div_(importance), o_[part])
                if variance:
                    read(q_[part].square(), importance.reciprocal_(), w_[part])
        return o, w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dw: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = [x.new_empty(x.shape) for x in inputs]
        with torch.autocast(do.device.type, enabled=False):
            for rows in blocks(inputs[0], inputs[2]):
                found = differentiate(ctx.variance, *(x[rows] for x in (do, dw, *inputs)))
                for whole, x in zip(gradients, found):
                    whole[rows] = x
        return None, *gradients


def blocks(q: Tensor, v: Tensor) -> Iterator[slice]:
    """Rows that are taken together."""
    rows = max(1, BOUNDS // (q.shape[1] * q.shape[3] * v.shape[3]))
    return (slice(first, first + rows) for first in range(0, len(q), rows))


class Posterior:
    """The memory in a block of chunks, made for some of its sub-chunks at a time."""

    def __init__(
        self, k: Tensor, v: Tensor, beta: Tensor, within: Tensor, over: Tensor, prior: Tensor, M: Tensor, J: Tensor
    ) -> None:
        self.means = Memory(k, v, within, over, M)
        self.importances = Memory(k.square(), beta, within, over, J)
        n, s, c, K = k.shape
        self.prior = prior.repeat_interleave(s)[:, None, None, None]
        largest = STATES["cpu" if k.device.type == "cpu" else "other"] // (c * K * v.shape[3])
        self.space = k.new_empty(2, min(max(1, largest), n * s), c, K, v.shape[3])

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Sub-chunks and, in a space that the next ones use again, M and the importance after their tokens [m,c,K,V]."""
        size = self.space.shape[1]
        for first in range(0, len(self.prior), size):
            part = slice(first, first + size)
            M, importance = self.space[:, : len(self.prior[part])]
            self.means.ingredients.part(part).states(M)
            self.importances.ingredients.part(part).states(importance).add_(self.prior[part])
            yield part, M, importance


def read(q: Tensor, memory: Tensor, out: Tensor) -> None:
    """out [m,c,V] = memory [m,c,K,V]^T q [m,c,K]."""
    torch.bmm(q.flatten(0, 1)[:, None], memory.flatten(0, 1), out=out.flatten(0, 1)[:, None])


def differentiate(variance: bool, do: Tensor, dw: Tensor, q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Gradients in q, k, v, beta, within, over, prior, M, J of a block."""
    posterior = Posterior(k, *others)
    d_mean, d_importance = posterior.means.ingredients.empty_like(), posterior.importances.ingredients.empty_like()
    minus_dq, dprior = q.new_empty(q.shape), q.new_empty(q.shape[:2])
    q_, do_, dw_, minus_dq_, dprior_ = (x.flatten(0, 1) for x in (q, do, dw, minus_dq, dprior))
    for part, M, importance in posterior.parts():
        do_row = do_[part][:, :, None]
        spread = importance.reciprocal_()
        read_by_do = M.mul_(spread).mul_(-do_row)
        torch.sum(read_by_do, -1, out=minus_dq_[part])
        q_spread = spread.mul_(q_[part][..., None])
        if variance:
            dw_row = dw_[part][:, :, None]
            minus_dq_[part] -= 2 * (q_spread @ dw_row.mT)[..., 0]
            read_by_do.addcmul_(q_spread, dw_row, value=-1)
        dJ_t = read_by_do.mul_(q_spread)
        dM_t = q_spread.mul_(do_row)
        torch.sum(dJ_t, (1, 2, 3), out=dprior_[part])
        posterior.means.ingredients.part(part).adjoint(dM_t, d_mean.part(part))
        posterior.importances.ingredients.part(part).adjoint(dJ_t, d_importance.part(part))
    dk, dv, dwithin, dover, dM = posterior.means.gradients(d_mean)
    dk2, dbeta, dwithin2, dover2, dJ = posterior.importances.gradients(d_importance)
    return minus_dq.neg_(), dk + 2 * k * dk2, dv, dbeta, dwithin + dwithin2, dover + dover2, dprior.sum(1), dM, dJ
