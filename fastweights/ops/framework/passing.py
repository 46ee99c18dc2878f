"""How states pass from one part of a sequence to the next: what an op declares whose parts map states affinely.

A part of a sequence takes the state S before it to M S + E, where M and E depend on the part's tokens alone. So all parts compute
M and E at once, and a chain of small products finds the state that each part begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Passing", "Sum", "Summary", "Transition"]

Named = Mapping[str, Any]
BLOCK = 32  # tokens


class Summary(NamedTuple):
    """added: what a part adds to the state, [R, G, ...]. kept: the factor on the state before it, [R, G] or [R, G, K]."""

    added: Tensor
    kept: Tensor


@dataclass(frozen=True, kw_only=True)
class Sum:
    r"""$S_t = a_t S_{t-1} + \beta_t\, x_t y_t^\top$, where M is the product of the decays a.

    Attributes:
        x, y: names of the inputs. The state is [K, K] or [K, V].
        gain: name of beta; 1 when None.
        decay: name of the log decay, one per head or per channel of x; none when None.
        diagonal: whether the state [K] is the diagonal of this sum.
        dtype: of the sum; that of the op's computation when None.
    """

    x: str
    y: str
    gain: str | None = None
    decay: str | None = None
    diagonal: bool = False
    dtype: torch.dtype | None = None

    @property
    def inputs(self) -> list[str]:
        return [name for name in dict.fromkeys((self.x, self.y, self.gain, self.decay)) if name is not None]

    def summarize(self, inputs: Named, begin: Tensor | None) -> Summary:
        """What the tokens from number `begin` on (all when None) add and keep.

        Args:
            inputs: [R, T, G, ...], in the dtype of the sum.
            begin: a number on the device.
        """
        x, y = inputs[self.x], inputs[self.y]
        weight = x.new_ones(x.shape[:3]) if self.gain is None else inputs[self.gain]
        kept = x.new_ones(x.shape[0], x.shape[2])
        g = None if self.decay is None else inputs[self.decay]
        if g is not None:
            g = _fill_before(g, begin)
            until_end = _sum_until_end(g)
            kept = until_end[:, 0].exp()
            # The sum of the tokens after each, not a difference of two sums, which may both be -inf.
            after = F.pad(until_end[:, 1:], (0, 0) * (g.ndim - 2) + (0, 1)).exp()
            weight = weight[..., None] * after if g.ndim == 4 else weight * after
        x = _fill_before(x * (weight if weight.ndim == 4 else weight[..., None]), begin)
        y = _fill_before(y, begin)
        return Summary((x * y).sum(1) if self.diagonal else torch.einsum("rtgk,rtgv->rgkv", x, y), kept)

    def begin(self, shape: Sequence[int], state: Tensor | None, like: Tensor, options: Named) -> Tensor:
        """The sum of this shape that an initial state stands for, in the dtype of `like`; state: None where none is given."""
        return like.new_zeros(shape) if state is None else state.to(like.dtype)

    def state_of(self, total: Tensor, options: Named) -> Tensor:
        """The state that a sum stands for."""
        return total


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A state [K, V] that the op changes from the left, S <- M S + E, and reads as o = S^T q: both are linear in the state and
    the values. So the op itself finds M. Called with K more values, all zero, and the identity as their state, it returns M as
    their state, and as their outputs the queries that would read the same from the state before the part.

    Attributes:
        values: name of the input.
    """

    values: str = "v"


@dataclass(frozen=True, kw_only=True)
class Passing:
    """How the states of an op pass.

    Attributes:
        states: by name, in any order. At most one is a `Transition`, which may depend on the others.
        without: inputs that must be None.
    """

    states: Mapping[str, Sum | Transition]
    without: tuple[str, ...] = ()

    def serves(self, inputs: Named) -> bool:
        """Whether the states of a call with these inputs pass so."""
        return all(inputs[name] is None for name in self.without)

    @property
    def sums(self) -> dict[str, Sum]:
        return {name: way for name, way in self.states.items() if isinstance(way, Sum)}


def _sum_until_end(x: Tensor) -> Tensor:
    """The reverse cumsum of x [R, T, ...] over time.

    By blocks of 32 tokens, then their sums in the same way: torch 2.11 fails to compile a long cumsum of few rows ("split scan").
    """
    rows, time, *rest = x.shape
    if time <= BLOCK:
        return x.flip(1).cumsum(1).flip(1)
    blocks = F.pad(x, (0, 0) * len(rest) + (0, -time % BLOCK)).view(rows, -1, BLOCK, *rest)
    own = blocks.flip(2).cumsum(2).flip(2)
    after = F.pad(_sum_until_end(own[:, :, 0])[:, 1:], (0, 0) * len(rest) + (0, 1))
    return (own + after[:, :, None]).flatten(1, 2)[:, :time]


def _fill_before(x: Tensor, begin: Tensor | None) -> Tensor:
    """x [R, T, ...] with zeros in the place of the tokens before `begin`, also of those that are NaN."""
    if begin is None:
        return x
    token = torch.arange(x.shape[1], device=x.device).view(-1, *[1] * (x.ndim - 2))
    return x.masked_fill(token < begin, 0.0)
