"""Which parameters an optimizer pulls towards zero."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checks import check_number

__all__ = ["weight_decay_groups"]


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: matrices decay; norms, biases and the decay parameters of the layers (those
    that a module names in `_no_weight_decay`) do not. Parameters that do not train are left out, shared ones come once.

    Raises:
        ValueError: a negative weight_decay.
    """
    check_number("weight_decay", weight_decay, low=0)
    exempt = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim < 2 or name in getattr(module, "_no_weight_decay", ())
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in exempt], "weight_decay": 0.0},
    ]
