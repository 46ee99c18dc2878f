"""The key preconditioner of PDN, PGDN and PKDA."""

from __future__ import annotations

import torch

from .panels import Panel, distribution
from .reading import LayerReading

__all__ = ["preconditioner"]


def preconditioner(layer: LayerReading) -> list[Panel]:
    """Distributions over places and key channels of the key energy A, and over tokens and key channels of the factors B that
    turn keys into write keys. Preconditioned DeltaNet, figures 2 and 13."""
    if "precond_beta" not in layer.values:
        return []
    panels = [distribution("energy", layer.states["A"], "key energy A", log_x=True)] if "A" in layer.states else []
    if "write_key" in layer.values:
        k = layer.per_head("k")
        seen = k.abs() > 1e-3 * k.abs().amax(2, keepdim=True)  # elsewhere rounding would decide
        factors = torch.where(seen, layer.per_head("write_key") / k, torch.nan)
        panels.append(distribution("factor", factors, "factor B of the write key"))
    return panels
