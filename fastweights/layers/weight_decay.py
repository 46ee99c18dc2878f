"""Parameters that weight decay must leave alone."""

from __future__ import annotations

from torch import nn

from ..checks import describe_value

__all__ = ["undecayed_parameters"]


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay must leave alone: those that their module names in `_no_weight_decay`, and
    those that bear the mark `_no_weight_decay = True`, Mamba's convention. Norms and biases have no mark.

    Raises:
        TypeError: model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe_value(model)}")
    found = set()
    for prefix, module in model.named_modules():
        named = getattr(module, "_no_weight_decay", ())
        for name, parameter in module.named_parameters(recurse=False):
            if getattr(parameter, "_no_weight_decay", False) or (isinstance(named, (tuple, list)) and name in named):
                found.add(f"{prefix}.{name}" if prefix else name)
    return found
