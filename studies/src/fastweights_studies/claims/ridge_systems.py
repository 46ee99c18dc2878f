"""Ridge systems of growing Gram matrices, as Gated KalmaNet solves them at every token, and how far a solver gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fastweights.ops.shared.ridge import iterations as solvers

from .draws import Draws

__all__ = ["GUARDED", "RidgeSystems", "growing_systems", "guarded_solver"]

GUARD = 1e-6  # added to the divisors of conjugate gradients
PLAIN, GUARDED = "conjugate_gradient", "guarded_conjugate_gradient"  # of our ops, and with the guard


def solve_guarded(apply: Callable[[Tensor], Tensor], b: Tensor, iterations: int) -> Tensor:
    """Conjugate gradients from zero with `GUARD` in both divisors, and b as it is. Once the squared residual is no larger than
    the guard, steps are too short."""
    x, residual = torch.zeros_like(b), b
    direction, energy = residual, residual.square().sum(-1, keepdim=True)
    for _ in range(iterations):
        image = apply(direction)
        step = energy / ((direction * image).sum(-1, keepdim=True) + GUARD)
        x, residual = x + step * direction, residual - step * image
        left = residual.square().sum(-1, keepdim=True)
        direction, energy = residual + left / (energy + GUARD) * direction, left
    return x


@contextmanager
def guarded_solver(solver: str) -> Iterator[str]:
    """The name of a solver for our ops, which take guarded conjugate gradients for theirs within the block if it is `GUARDED`."""
    if solver != GUARDED:
        yield solver
        return
    with patch.object(solvers, PLAIN, solve_guarded):
        yield PLAIN


class RidgeSystems(NamedTuple):
    """(G + ridge I) x = q with |G|_F = 1: G [n, K, K], q [n, K]."""

    gram: Tensor
    q: Tensor
    ridge: float

    def residual(self, solver: str, iterations: int, dtype: torch.dtype = torch.float64) -> float:
        """The largest |q - (G + ridge I) x| / |q| of a solver in `dtype`. bfloat16 rounds matrix and operand of every product,
        the rest is float32 then."""
        A = self.gram + self.ridge * torch.eye(self.gram.shape[-1], dtype=self.gram.dtype, device=self.gram.device)
        working = torch.float32 if dtype == torch.bfloat16 else dtype
        operand = A.to(dtype)

        def apply(x: Tensor) -> Tensor:
            return (operand.to(working) @ x.to(dtype).to(working)[..., None])[..., 0]

        b = self.q.to(dtype).to(working)
        low = torch.full_like(b[..., :1], self.ridge)
        with guarded_solver(solver) as name:
            x = solvers.iterate(name, apply, b, low, torch.ones_like(low), iterations).double()
        return ((self.q - (A @ x[..., None])[..., 0]).norm(dim=-1) / self.q.norm(dim=-1)).max().item()


def growing_systems(draws: Draws, length: int, channels: int, heads: int, ridge: float, every: int) -> RidgeSystems:
    """Of random unit keys and queries, at every `every`-th token of every head."""
    k, q = draws.unit(heads, length, channels), draws.unit(heads, length // every, channels)
    pieces = k.unflatten(1, (-1, every))
    grams = (pieces.mT @ pieces).cumsum(1).flatten(0, 1)
    return RidgeSystems(grams / torch.linalg.matrix_norm(grams)[:, None, None], q.flatten(0, 1), ridge)
