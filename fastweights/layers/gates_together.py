"""Gates of one input: in a training on a GPU their projections are one matrix product.

A product with the few columns of a gate takes as long as reading x, writing its gradient or reading it for the weights: with one
product in place of two to four, that happens once.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .few_rows import is_plain
from .shared_input import trains_on_gpu
from .wrapped import is_bare, is_unhooked

__all__ = ["ProjectedGate", "first_part", "gates_together"]


def first_part(projection: Any) -> nn.Module | None:
    """The first part of a projection in two; None where its parts must not be called one by one, past hooks or an adapter."""
    return projection[0] if is_bare(projection, nn.Sequential) else None


class ProjectedGate(nn.Module):
    """A gate that multiplies its input with a weight first (`projection`) and computes the rest from the product (`finish`)."""

    @property
    def projection(self) -> nn.Module | None:
        """None where the input must not be projected apart from the gate."""
        raise NotImplementedError

    def finish(self, y: Tensor) -> Tensor:
        """The gate, given projection(x)."""
        raise NotImplementedError


def gates_together(x: Tensor, *gates: nn.Module | None) -> list[Any]:
    """What each gate gives for x [B, T, D]; None for a gate that is None."""
    joined: list[ProjectedGate] = []
    if trains_on_gpu(x):
        joined = [gate for gate in gates if isinstance(gate, ProjectedGate) and _begins_with_product(gate)]
    if len(joined) < 2:
        return [None if gate is None else gate(x) for gate in gates]
    weights = [cast(Any, gate.projection).weight for gate in joined]
    columns = iter(F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], -1))
    return [None if gate is None else gate.finish(next(columns)) if gate in joined else gate(x) for gate in gates]


def _begins_with_product(gate: ProjectedGate) -> bool:
    """Whether the gate multiplies x with a weight first, and nothing notices how it is called."""
    first = gate.projection
    return first is not None and is_plain(first) and first.bias is None and all(map(is_unhooked, gate.modules()))
