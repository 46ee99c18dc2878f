"""A slot as direction and length, and how the loops over tokens lay a chunk out; and one step of a slot.

A slot of zeros has no direction: it answers nothing, is not written and stays zero. Every other slot keeps a direction: a
decay below the resolution of its dtype counts as that resolution, so that a slot which is forgotten and not written at one
token keeps the direction it had, and a slot that is not zero is at least SHORTEST long.

In a chunk the tokens come first, and vectors are rows: a product of a row with a matrix is the fast one.

The step of a slot s of length 1:
    s' = (d s + a (h - b s)) / m = f s + w h        b = s.h   d: decay   a: size of the step
    m  = |d s + a (h - b s)| = sqrt(d^2 + a^2 (|h|^2 - b^2))        f = (d - a b) / m   w = a / m
The difference in the root is kept at 0 or more: it is 0 up to rounding where h lies along s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SHORTEST = 1e-6


def direction_and_length(S: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] -> [..., V] of length 1 and the length [..., 1]; both 0, with gradient 0, where there is nothing."""
    square = S.square().sum(-1, keepdim=True)
    inverse = square.masked_fill(square == 0, torch.inf).rsqrt()
    length = square * inverse
    return S * inverse, torch.where(square > 0, length.clamp_min(SHORTEST), length)


def inverse(length: Tensor) -> Tensor:
    """1 / length, 0 where there is none."""
    return length.masked_fill(length == 0, torch.inf).reciprocal()


def clamp_decay(decay: Tensor) -> Tensor:
    """Decay of at least the resolution of its dtype, with the gradient of the decay that was given."""
    smallest = torch.finfo(decay.dtype).eps
    return decay + (smallest - decay).clamp_min(0).detach()


def to_rows(x: Tensor) -> Tensor:
    """[G, C, n] -> [C, G, 1, n], a copy."""
    return x.transpose(0, 1)[:, :, None].clone(memory_format=torch.contiguous_format)


def from_rows(x: Tensor) -> Tensor:
    """[C, G, 1, n] -> [G, C, n]"""
    return x[:, :, 0].transpose(0, 1)


def optional_rows(x: Tensor | None, count: int) -> list[None] | Tensor:
    """One row per token, or None for each token."""
    return [None] * count if x is None else to_rows(x)


def reversed_tokens(*xs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tokens' parts, last token first."""
    return zip(*(x.unbind(0)[::-1] for x in xs))


def turn(b: Tensor, a: Tensor, d_square: Tensor, square: Tensor, w: Tensor, inverse: Tensor) -> None:
    """Write w and 1 / m of one token, [..., K] as b and a are, from d^2 and |h|^2 [..., 1]."""
    torch.addcmul(square, b, b, value=-1, out=inverse).clamp_min_(0)
    torch.mul(a, a, out=w)
    torch.addcmul(d_square, w, inverse, out=inverse).rsqrt_()
    torch.mul(a, inverse, out=w)


class Turns:
    """The steps of a chunk from b, a [..., K] and d, |h|^2 [..., 1], and their derivatives.

    With A = s.ds' and D = h.ds', where ds' is the gradient in s', and E = s'.ds' = f A + w D less the gradient in log m, if any:
        db = across_b E - w A                        da = (D - b A) / m - across_a E
        dd = sum over slots of (A - d E / m) / m     d|h|^2 = - sum over slots of w^2 E / 2
    """

    def __init__(self, b: Tensor, a: Tensor, d: Tensor, square: Tensor) -> None:
        across = torch.addcmul(square, b, b, value=-1).clamp_min_(0)
        self.b, self.d = b, d
        self.inverse = inverse = torch.addcmul(d.square(), a.square(), across).rsqrt_()
        self.f = torch.addcmul(d, a, b, value=-1).mul_(inverse)
        self.w = w = a * inverse
        self.across_a = across.mul_(w).mul_(inverse)
        self.across_b = w.square().mul_(b)

    def d_b_factors(self, shrink: Tensor | None) -> tuple[Tensor, Tensor]:
        """The factors x and y of db = x A + y D in the step divided by m, where a contains the term -shrink b."""
        of_A, of_D = self.across_b * self.f - self.w, self.across_b * self.w
        if shrink is not None:
            of_A += shrink * (self.inverse * self.b + self.across_a * self.f)
            of_D -= shrink * (self.inverse - self.across_a * self.w)
        return of_A, of_D

    def d_a(self, A: Tensor, D: Tensor, E: Tensor) -> Tensor:
        return torch.addcmul(D, self.b, A, value=-1).mul_(self.inverse).addcmul_(self.across_a, E, value=-1)

    def d_d(self, A: Tensor, D: Tensor) -> Tensor:
        """In the step divided by m. The terms are multiplied out, so that the gradient is exactly 0 where a = 0: there s' = s for
        every d."""
        kept = self.inverse.square() * self.d
        return (self.w * (self.across_a * A + kept * (self.b * A - D))).sum(-1, keepdim=True)

    def d_square(self, E: Tensor) -> Tensor:
        return (self.w.square() * E).sum(-1, keepdim=True) / -2
