"""Decay inside a chunk, exact for every g in [-inf, 0]: decay factors are only ever multiplied, never divided out.

Symbols: a_t = exp(g_t) decay of token t; a(j, i] product of a over the tokens after j up to and with i; C chunk size, a
power of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def make_decay(g: Tensor | None, chunks: int) -> Decay:
    """The decay of M chunks from their g: None, [M, H, C] (one number per head) or [M, H, C, K] (one per key channel)."""
    if g is None:
        return Decay(chunks)
    return HeadDecay(g.exp()[..., None]) if g.ndim == 3 else ChannelDecay(g.exp())


class Decay:
    """No decay; also the interface. x and y are [M, H, C, channels]."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks

    def carry_from_start(self, x: Tensor) -> Tensor:
        """x_i times what is left at token i of a state at the chunk's start."""
        return x

    def carry_to_end(self, x: Tensor) -> Tensor:
        """x_i times what is left at the chunk's end of a write at token i."""
        return x

    def across(self, like: Tensor) -> Tensor:
        """[M, 1 or H, 1 or K, 1] what the whole chunk leaves of a state."""
        return like.new_ones(self.chunks, 1, 1, 1)

    def scores(self, y: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """For each x: [.., i, j] = sum_c x_ic y_jc a_c(j, i] for i >= j, and 0 for i < j."""
        return tuple((x @ y.mT).tril() for x in xs)


class ChannelDecay(Decay):
    """One decay per key channel and token, a [M, H, C, K]."""

    def __init__(self, a: Tensor) -> None:
        super().__init__(len(a))
        self.rungs, self.kept_from_start, self.kept_to_end = multiply_in_blocks(a)

    def carry_from_start(self, x: Tensor) -> Tensor:
        return x * self.kept_from_start

    def carry_to_end(self, x: Tensor) -> Tensor:
        return x * self.kept_to_end

    def across(self, like: Tensor) -> Tensor:
        return self.kept_from_start[:, :, -1, :, None]

    def scores(self, y: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """By halves: token i of a right half and token j of the left half before it meet at the border between them,
        a(j, i] = a(j, border] a(border, i]. log2(C) levels of matrix products."""
        blocks = torch.stack([(x * y).sum(-1) for x in xs], -2)[..., None, None]  # [M, H, X, C, 1, 1]
        for kept_left, kept_right in self.rungs:
            left, _ = _halves(y, kept_left)
            right = torch.cat([_halves(x, kept_left)[1] * kept_right for x in xs], -2)
            corner = (right @ (left * kept_left).mT).unflatten(-2, (len(xs), -1)).movedim(-3, 2)
            blocks = _join(blocks, corner)
        return blocks[..., 0, :, :].unbind(2)


class HeadDecay(ChannelDecay):
    """One decay per head and token, a [M, H, C, 1]. `between` [M, H, i, j] is a(j, i] for i >= j, else 0."""

    def __init__(self, a: Tensor) -> None:
        super().__init__(a)
        blocks = torch.ones_like(a)[:, :, None, :, :, None]
        for kept_left, kept_right in self.rungs:
            blocks = _join(blocks, (kept_right * kept_left.mT)[:, :, None])
        self.between = blocks[:, :, 0, 0]

    def scores(self, y: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple((x @ y.mT) * self.between for x in xs)


def multiply_in_blocks(a: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Products of a [M, H, C, K] inside blocks of 1, 2, 4 .. C tokens. For each step from blocks of w to blocks of 2w: what
    the left half's tokens keep until the border, a(j, border], and what the right half's tokens keep of the border,
    a(border, i], both [M, H, C/2w, w, K]. Last, what is kept from the chunk's start and to its end, [M, H, C, K]."""
    rungs = []
    upto, after = a[..., None, :], torch.ones_like(a)[..., None, :]  # [M, H, blocks, w, K]
    while upto.shape[2] > 1:
        left_upto, right_upto = upto.unflatten(2, (-1, 2)).unbind(3)
        left_after, right_after = after.unflatten(2, (-1, 2)).unbind(3)
        rungs.append((left_after, right_upto))
        upto = torch.cat([left_upto, right_upto * left_upto[..., -1:, :]], -2)
        after = torch.cat([left_after * right_upto[..., -1:, :], right_after], -2)
    return rungs, upto[:, :, 0], after[:, :, 0]


def _halves(x: Tensor, half: Tensor) -> tuple[Tensor, ...]:
    """[M, H, C, K] -> the left and the right halves of its blocks, each [M, H, C/2w, w, K] like `half`."""
    return x.unflatten(2, (half.shape[2], 2, half.shape[3])).unbind(3)


def _join(blocks: Tensor, corner: Tensor) -> Tensor:
    """Lower-triangular blocks [.., 2n, w, w] and what is below each left of two, [.., n, w, w] -> [.., n, 2w, 2w]."""
    upper, lower = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([F.pad(upper, (0, upper.shape[-1])), torch.cat([corner, lower], -1)], -2)
