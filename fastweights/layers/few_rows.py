"""Linear modules on the few rows of a decoding step, joined with each other and with what follows them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.linear_rows import linear_rows, takes_linear_rows
from .initialization import ResidualProjection, UniformLinear

__all__ = ["is_unhooked", "joins", "linear_together"]

PLAIN = (nn.Linear, ResidualProjection, UniformLinear)


def is_unhooked(module: nn.Module) -> bool:
    """Whether nothing but its own forward runs when the module is called. Hooks of accelerate bring its weights, so it must be
    called."""
    return "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks


def is_plain(module: nn.Module) -> bool:
    """Whether the module does nothing but multiply with its weight: adapters, quantised layers and hooks do more."""
    return type(module) in PLAIN and type(module.weight) is nn.Parameter and is_unhooked(module)


def joins(x: Tensor, *modules: Any, backend: str = "auto") -> bool:
    """Whether `linear_rows` may take the place of the modules' calls on x."""
    if not all(map(is_plain, modules)):
        return False
    parameters = [given for one in modules for given in (one.weight, one.bias)]
    return takes_linear_rows(x, *parameters, backend=backend)


def linear_together(x: Tensor, *modules: Any, backend: str = "auto") -> list[Tensor]:
    """What each of up to three modules without bias gives for x, by one kernel for few rows."""
    if joins(x, *modules, backend=backend) and all(module.bias is None for module in modules):
        return linear_rows(x, *(module.weight for module in modules))
    return [module(x) for module in modules]
