"""Random tensors for the inputs of the ops, by the kind that their roles name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DRAWS", "draw"]

Shape = tuple[int, ...]
Drawn = Mapping[str, Tensor]
Draw = Callable[[Shape, torch.Generator, Drawn], Tensor]


def _normal(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _unit(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return F.normalize(_normal(shape, generator, drawn), dim=-1)


def _positive(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return F.elu(_normal(shape, generator, drawn)) + 1.0


def _penalty(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return _unit(shape, generator, drawn) * shape[-1] ** -0.5


def _gate(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return _normal(shape, generator, drawn).sigmoid()


def _decay(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return F.logsigmoid(_normal(shape, generator, drawn) + 2.0)


def _slow_decay(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    """Decays near 1, for rules that forget their prior as well."""
    return 0.1 * _decay(shape, generator, drawn)


def _write_key(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    """The key with every channel scaled by a factor near 1: an unrelated write key would make the memory diverge."""
    return drawn["k"] * torch.exp(0.4 * _normal(shape, generator, drawn).tanh())


def _erasure(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    """The direction that is read, negated, with every channel at a rate between 0 and 1: any other would make the memory
    diverge."""
    return -drawn["a"] * _gate(shape, generator, drawn)


def _kept(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return _decay(shape, generator, drawn).exp()


def _ridge(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return 0.25 + F.softplus(_normal(shape, generator, drawn))


def _prior(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return 0.5 + _normal(shape, generator, drawn).sigmoid()


def _center(shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    return 0.3 * _normal(shape, generator, drawn) - 0.2


DRAWS: dict[str, Draw] = {
    "query": _unit,
    "key": _unit,
    "write key": _write_key,
    "erasure": _erasure,
    "positive query": _positive,
    "positive key": _positive,
    "penalty": _penalty,
    "value": _normal,
    "joint value": _unit,
    "gate": _gate,
    "kept": _kept,
    "value gate": _gate,
    "decay": _decay,
    "slow decay": _slow_decay,
    "center": _center,
    "prior": _prior,
    "ridge": _ridge,
}


def draw(kind: str, shape: Shape, generator: torch.Generator, drawn: Drawn) -> Tensor:
    """A float64 tensor of this kind; `drawn` are the inputs that were drawn before it."""
    return DRAWS[kind](shape, generator, drawn)
