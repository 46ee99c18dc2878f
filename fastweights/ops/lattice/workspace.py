"""Buffers that the chunks of one call share, with the views that a loop over tokens takes of them: on a CPU making a view
costs as much as the arithmetic of a step. G rows, C tokens, K slots of V numbers; see coefficients.py for the contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor


class ForwardSpace:
    def __init__(self, like: Tensor, G: int, C: int, K: int) -> None:
        self.b, self.f, self.w = (like.new_empty(G, C, K) for _ in range(3))
        self.inverse = like.new_empty(G, K)
        self.overlap = like.new_empty(G, C, C)
        self.kept = like.new_zeros(C, G, C, K)
        self.tokens = [
            (
                (self.b[:, t], self.f[:, t], self.w[:, t]),
                (self.f[:, t, None], self.w[:, t, None]),
                (self.b[:, t + 1 :], self.overlap[:, t, t + 1 :, None]),
                (self.kept[t - 1, :, :t], self.kept[t, :, :t], self.kept[t, :, t]),
            )
            for t in range(C)
        ]


class BackwardSpace:
    """Two columns a state, 2 C + 2 in all; `last` is the first column of the last state."""

    def __init__(self, like: Tensor, G: int, C: int, K: int, V: int) -> None:
        self.last = last = 2 * C
        self.reads = like.new_zeros(G, C + 1, 2, V)
        self.overlap = like.new_empty(G, C, last + 2)
        self.inner = inner = like.new_empty(C + 1, G, last + 2, K)
        self.weights = weights = like.new_zeros(C + 1, G, last + 2, K)
        product = like.new_empty(G, last, K)
        self.inner_tokens, self.weight_tokens = [], []
        for t in range(C):
            after, later = 2 * t + 2, 2 * t + 4
            tail = self.overlap[:, t, after:]
            self.inner_tokens.append(
                (inner[t, :, after:], inner[t + 1, :, after:], inner[t + 1, :, last], tail[..., None])
            )
            self.weight_tokens.append(
                (
                    (weights[min(t + 2, C), :, later:], weights[t + 1, :, later:], weights[t + 1, :, after + 1]),
                    (weights[t + 1, :, after:], weights[t + 1, :, last], weights[t, :, 2 * t]),
                    (inner[t, :, after:], product[:, : last - 2 * t], tail[:, None]),
                )
            )


Space = TypeVar("Space", ForwardSpace, BackwardSpace)


class Workspace:
    """One space of each kind and size."""

    def __init__(self) -> None:
        self.spaces: dict = {}

    def get(self, kind: Callable[..., Space], like: Tensor, *sizes: int) -> Space:
        key = (kind, *sizes)
        if key not in self.spaces:
            self.spaces[key] = kind(like, *sizes)
        return self.spaces[key]
