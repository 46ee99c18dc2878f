"""How states pass from one part of a sequence to the next: the declaration of an op whose parts map states affinely.

A part of a sequence takes the state S before it to M S + E, where M and E depend on the part's tokens alone. So all parts compute
M and E at once, and a chain of small products finds the state that each begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Passing", "Sum", "Transition"]

Named = Mapping[str, Any]


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
    """

    x: str
    y: str
    gain: str | None = None
    decay: str | None = None
    diagonal: bool = False
    dtype: torch.dtype | None = None  # of the computation when None

    def summarize(self, inputs: Named, begin: Tensor | None) -> Summary:
        """What the tokens from the number `begin` on add and keep, for inputs [R, T, G, ...] in the dtype of the sum; all
        tokens when None."""
        x, y = inputs[self.x], inputs[self.y]
        weight = x.new_ones(x.shape[:3]) if self.gain is None else inputs[self.gain]
        kept = x.new_ones(x.shape[0], x.shape[2])
        g = None if self.decay is None else inputs[self.decay]
        if g is not None:
            g = _fill_before(g, begin, 0.0)
            until_end = g.flip(1).cumsum(1).flip(1)
            kept = until_end[:, 0].exp()
            after = F.pad(until_end[:, 1:], (0, 0) * (g.ndim - 2) + (0, 1)).exp()
            weight = weight[..., None] * after if g.ndim == 4 else weight * after
        x = _fill_before(x * (weight if weight.ndim == 4 else weight[..., None]), begin, 0.0)
        y = _fill_before(y, begin, 0.0)
        return Summary((x * y).sum(1) if self.diagonal else torch.einsum("rtgk,rtgv->rgkv", x, y), kept)

    def begin(self, state: Tensor | None, like: Tensor, options: Named) -> Tensor:
        """The sum before the first token from the initial states [R, G, ...]; zeros, as `like`, when None."""
        return torch.zeros_like(like) if state is None else state.to(like.dtype)

    def state_of(self, total: Tensor, options: Named) -> Tensor:
        """The state that a sum stands for."""
        return total


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A state [K, V] on which the op acts from the left, S <- M S + E, and which it reads by o = S^T q: both are linear in the
    state and the values. Called with zeros as K more values and the identity as their state, the op itself returns M, and the
    answers by which the state before the part adds to its outputs.

    Attributes:
        values: name of the input.
    """

    values: str = "v"


@dataclass(frozen=True, kw_only=True)
class Passing:
    """The declaration of an op.

    Attributes:
        states: how each state passes, in the order of the op's states. At most one is a `Transition`, which may depend on the
            other states.
        without: inputs that must be None.
    """

    states: Mapping[str, Sum | Transition]
    without: tuple[str, ...] = ()

    def serves(self, inputs: Named) -> bool:
        """Whether this call's states pass so."""
        return all(inputs[name] is None for name in self.without)

    @property
    def sums(self) -> dict[str, Sum]:
        return {name: way for name, way in self.states.items() if isinstance(way, Sum)}

    @property
    def transition(self) -> tuple[str, str] | None:
        """The name of the state that has one, and that of its values."""
        found = [(name, way.values) for name, way in self.states.items() if isinstance(way, Transition)]
        return found[0] if found else None


def _fill_before(x: Tensor, begin: Tensor | None, number: float) -> Tensor:
    """x [R, T, ...] with a number in the place of the tokens before `begin`."""
    if begin is None:
        return x
    token = torch.arange(x.shape[1], device=x.device).view(-1, *[1] * (x.ndim - 2))
    return x.masked_fill(token < begin, number)
