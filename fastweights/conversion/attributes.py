"""Numbers of a layer by their dotted names, whether parameters or plain attributes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["set_value"]


@torch.no_grad()
def set_value(layer: nn.Module, name: str, value: float | Tensor) -> float | Tensor:
    """Give an attribute, or every number of a parameter, a value; returns what was there."""
    path, _, attribute = name.rpartition(".")
    owner = layer.get_submodule(path)
    present = getattr(owner, attribute)
    if not isinstance(present, Tensor):
        setattr(owner, attribute, value)
        return present
    before = present.clone()
    present.copy_(torch.as_tensor(value))
    return before
