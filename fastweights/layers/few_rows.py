"""Linear modules joined with each other: on the few rows of a decoding step also with what follows them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.linear_rows import linear_rows, takes_linear_rows
from .initialization import ResidualProjection, UniformLinear
from .shared_input import products_of_one_input, sums_gradients

__all__ = ["is_bare", "is_plain", "is_unhooked", "joins", "linear_together"]

PLAIN = (nn.Linear, ResidualProjection, UniformLinear)


def is_unhooked(module: nn.Module) -> bool:
    """Whether nothing but its own forward and its backward runs when the module is called. Hooks of accelerate bring its
    weights, so it must be called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return "forward" not in module.__dict__ and not any(hooks)


def is_bare(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether the module is of one of these classes and unhooked, and no adapter wraps it. Only then may its parameters be
    read past its call."""
    return type(module) in classes and is_unhooked(module)


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
