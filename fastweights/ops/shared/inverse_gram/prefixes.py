"""G_t^-1 b_t for all tokens of a chunk from one Cholesky factor.

With V^T V the inverse of G at the chunk's first token, left_t what later decay leaves of that, and the rows
w_t = sqrt(gain_t / left_t) V u_t:
    L = cholesky(I + W W^T)        Z = L^-1 W        G_t^-1 b_t = V^T (V b_t - sum_{j<=t} z_j (z_j . V b_t)) / left_t
because the leading blocks of L factor every prefix at once (Sherman-Morrison, t times over).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ridge.iterations import cache_blocks
from ..ridge.system import System
from .regularization import STRONG, allowance, diagonal, inverse_root

__all__ = ["Steps", "solve_prefixes"]

# What one factor can tell apart in double precision: a chunk is solved as two halves where less than LEFT of its start is
# left at its end, or where its solution is off by more than ERROR before its refinement. An inverse that has wound up enlarges
# what the refinement leaves in single tokens: outputs were off by up to 6e-2 with 1e-4, and by 6e-6 with 1e-6.
LEFT = 1e-8
ERROR = 1e-6


class Steps(NamedTuple):
    """n chunks of C tokens: G_t = a_t G_{t-1} + added_t I + gain_t u_t u_t^T from G_0 = start."""

    start: Tensor  # [n, K, K], or [M, H, K, K] for M chunks of H heads, and so on
    u: Tensor  # [n, C, K]
    gain: Tensor  # [n, C]
    a: Tensor  # [n, C]
    added: Tensor  # [n, C]

    def take(self, index: Tensor | slice) -> Steps:
        return Steps(*(x[index] for x in self))

    @property
    def half(self) -> int:
        return (self.a.shape[1] + 1) // 2

    def halves(self) -> tuple[Steps, Steps]:
        left, right = zip(*(x.split(self.half, 1) for x in self[1:]))
        before = Steps(self.start, *left)
        return before, Steps(before.end(), *right)

    def end(self) -> Tensor:
        """G after the last token."""
        kept = self.a.flip(1).cumprod(1).flip(1)  # of what was there before each token
        after = torch.cat([kept[:, 1:], torch.ones_like(kept[:, :1])], 1)
        written = ((self.gain * after)[..., None] * self.u).mT @ self.u
        return kept[:, 0, None, None] * self.start + written + diagonal((self.added * after).sum(1), self.start)


def solve_prefixes(b: Tensor, system: System, steps: Steps, ridge: float) -> Tensor:
    """x with `system` x = b at every token, b [M, H, C, K]. `steps` is the same system, token by token."""
    return _Solve.apply(ridge, b, *system, *steps)


class _Solve(torch.autograd.Function):
    """The gradient is implicit: db = G_t^-1 dx, and that of the matrix is -db x^T."""

    @staticmethod
    def forward(ctx: Any, ridge: float, b: Tensor, *tensors: Tensor) -> Tensor:
        system, steps = System(*tensors[:5]), Steps(*tensors[5:])
        x = torch.empty_like(b)
        for block in cache_blocks(b):
            x[block] = _solve(b[block], steps.take(block), ridge)
        ctx.ridge = ridge
        ctx.save_for_backward(x, *system, *steps)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        system, steps = System(*tensors[:5]), Steps(*tensors[5:])
        needed = ctx.needs_input_grad[1:]
        gradients = [torch.empty_like(y) if need else None for y, need in zip((x, *system), needed)]
        for block in cache_blocks(x):
            db = _solve(dx[block], steps.take(block), ctx.ridge)
            for whole, part in zip(gradients, (db, *system.take(block).adjoint(x[block], -db))):
                if whole is not None:
                    whole[block] = part
        return None, *gradients, *[None] * len(steps)


def _solve(b: Tensor, steps: Steps, ridge: float) -> Tensor:
    """x for b [M, H, C, K]."""
    flat = Steps(*(x.flatten(0, 1) for x in steps))
    return _solve_chunks(b.flatten(0, 1), flat, ridge).view_as(b)


def _solve_chunks(b: Tensor, steps: Steps, ridge: float) -> Tensor:
    """One factor for each of the n chunks, or for its halves where one is not enough."""
    left = torch.cat([torch.ones_like(steps.a[:, :1]), steps.a[:, 1:]], 1).cumprod(1)
    if b.shape[1] == 1:  # has no halves; a CUDA graph may capture it, as nothing is asked of the device
        return _factorize_and_solve(b, left, steps, ridge)[0]
    hard = (left[:, -1] < LEFT) | (steps.a[:, 1:] < STRONG).any(1)
    if not hard.any():
        x, error = _factorize_and_solve(b, left, steps, ridge)
        hard = ~(error <= ERROR)
    else:
        x, easy = torch.empty_like(b), ~hard
        x[easy], error = _factorize_and_solve(b[easy], left[easy], steps.take(easy), ridge)
        hard[easy] = ~(error <= ERROR)
    if hard.any():
        parts = zip(b[hard].split(steps.half, 1), steps.take(hard).halves())
        x[hard] = torch.cat([_solve_chunks(part, inside, ridge) for part, inside in parts], 1)
    return x


def _factorize_and_solve(b: Tensor, left: Tensor, steps: Steps, ridge: float) -> tuple[Tensor, Tensor]:
    """x after one refinement, and for each chunk how far that moved it, or how far the smallest weight that counts is felt,
    as a part of its length: the error is about the square."""
    left = left[..., None]
    first = steps.a[:, 0, None, None] * steps.start + diagonal(steps.added[:, 0], steps.start)
    least = allowance(first, ridge)
    root = inverse_root(first, least)
    rows = (steps.gain[..., None] / left).sqrt() * steps.u
    white = rows @ root.mT
    factor, _ = torch.linalg.cholesky_ex(white @ white.mT + torch.eye(b.shape[1], dtype=b.dtype, device=b.device))
    z = torch.linalg.solve_triangular(factor, white, upper=False)

    def solve(b: Tensor) -> Tensor:
        b = b @ root.mT
        return (b - (b @ z.mT).tril() @ z) @ root / left

    x = solve(b)
    step = solve(b - left * (x @ first + (x @ rows.mT).tril() @ rows))
    error = torch.maximum(_ratio(step, x), _ratio(least[:, None, None] * x, b))
    return x + step, error.amax(1)


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    return x.norm(dim=-1) / y.norm(dim=-1).clamp_min(torch.finfo(x.dtype).tiny)
