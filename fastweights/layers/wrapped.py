"""What others put around a module: hooks and adapters."""

from __future__ import annotations

from torch import nn

from ..private_torch import has_hooks

__all__ = ["is_bare", "is_unhooked"]


def is_unhooked(module: nn.Module) -> bool:
    """Whether nothing but its own forward and its backward runs when the module is called. Hooks of accelerate bring its
    weights, so it must be called."""
    return "forward" not in module.__dict__ and not has_hooks(module)


def is_bare(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether the module is of one of these classes and unhooked, and no adapter wraps it. Only then may its parameters be
    read past its call."""
    return type(module) in classes and is_unhooked(module)
