"""Linear modules joined with each other: on the few rows of a decoding step also with what follows them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.authoring import linear_rows, takes_linear_rows
from .initialization import ResidualProjection, UniformLinear
from .shared_input import products_of_one_input, sums_gradients
from .wrapped import is_bare

__all__ = ["is_plain", "joins", "linear_together"]

PLAIN = (nn.Linear, ResidualProjection, UniformLinear)


def is_plain(module: nn.Module) -> bool:
    """Whether the module does nothing but multiply with its weight: adapters, quantised layers and hooks do more."""
    return is_bare(module, *PLAIN) and type(module.weight) is nn.Parameter


def joins(x: Tensor, *modules: Any, backend: str = "auto") -> bool:
    """Whether `linear_rows` may take the place of the modules' calls on x."""
    if not all(map(is_plain, modules)):
        return False
    parameters = [given for one in modules for given in (one.weight, one.bias)]
    return takes_linear_rows(x, *parameters, backend=backend)


def linear_together(x: Tensor, *modules: Any, backend: str = "auto") -> list[Tensor]:
    """What each of up to three modules gives for x: by one kernel for few rows, with one gradient of x in training."""
    if all(map(is_plain, modules)) and all(module.bias is None for module in modules):
        weights = [module.weight for module in modules]
        if takes_linear_rows(x, *weights, backend=backend):
            return linear_rows(x, *weights)
        if sums_gradients(x):
            return list(products_of_one_input(x, *weights))
    return [module(x) for module in modules]
