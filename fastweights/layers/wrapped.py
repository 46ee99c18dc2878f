"""What others put around a module: hooks, adapters, and accelerate, which may keep its parameters on the host or on a disk and
brings them for its call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["execution_device", "is_bare", "is_unhooked", "placement_hooks", "remove_placement"]


def is_unhooked(module: nn.Module) -> bool:
    """Whether nothing but its own forward and its backward runs when the module is called. Hooks of accelerate bring its
    weights, so it must be called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return "forward" not in module.__dict__ and not any(hooks)


def is_bare(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether the module is of one of these classes and unhooked, and no adapter wraps it. Only then may its parameters be
    read past its call."""
    return type(module) in classes and is_unhooked(module)


def placement_hooks(layer: nn.Module) -> Iterator[Any]:
    """accelerate's hooks on the modules of a layer."""
    return (part.__dict__["_hf_hook"] for part in layer.modules() if "_hf_hook" in part.__dict__)


def execution_device(layer: nn.Module) -> torch.device:
    """Where the layer computes: where its parameters are, or where accelerate brings them."""
    for hook in placement_hooks(layer):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    first = next(layer.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def remove_placement(layer: nn.Module) -> None:
    """Take accelerate's hooks off the layer. The parameters stay where they are."""
    for part in layer.modules():
        if part.__dict__.pop("_hf_hook", None) is not None:
            part.__dict__.pop("forward")
            part.__dict__.pop("_old_forward")
