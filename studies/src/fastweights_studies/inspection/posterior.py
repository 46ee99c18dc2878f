"""Palimpsa's posterior: how unequal its importances are, and whether its variance tells its error."""

from __future__ import annotations

from typing import Any

import torch

from fastweights.layers import PalimpsaD, PalimpsaM

from .panels import Panel, make_curve
from .reading import LayerReading

__all__ = ["calibration", "metaplasticity"]

SHARES = 10


def _prior(layer: LayerReading) -> float | None:
    """None for layers without importances."""
    if isinstance(layer.mixer, (PalimpsaD, PalimpsaM)) and "J" in layer.states:
        return layer.mixer.options.prior
    return None


def metaplasticity(layer: LayerReading) -> list[Panel]:
    """(I_max - I_min) / I_min over the entries of the importance I = J + p. Palimpsa, section 4.1 and figure 3."""
    prior = _prior(layer)
    if prior is None:
        return []
    importance = layer.states["J"].flatten(2) + prior
    low, high = importance.amin(2), importance.amax(2)
    return [make_curve("ratio", layer.ends, (high - low) / low, "metaplasticity ratio", log_y=True)]


def calibration(layer: LayerReading) -> list[Panel]:
    """Squared error of the last memory's answers to the keys of the text, by tenths of the tokens from the smallest to the
    largest variance. The answer is (M / I)^T k, its variance (1 / I)^T k^2, and the value that the rule regresses on
    v* / beta, where v* is what the token writes; all means over value channels. Palimpsa, section 2.3."""
    prior = _prior(layer)
    if prior is None or "importance" not in layer.values:
        return []
    importance = layer.states["J"][-1] + prior
    k, beta, written = layer.per_head("k"), layer.values["importance"], layer.values["v"]
    if "step_size" in layer.values:
        written = written * layer.values["step_size"][..., None]
    target = written / beta.clamp_min(1e-12)
    answer = torch.einsum("tgk,gkv->tgv", k, layer.states["M"][-1] / importance)
    variance = torch.einsum("tgk,gkv->tgv", k.square(), 1 / importance).mean(2)
    error = (answer - target).square().mean(2)
    order = variance.argsort(0)
    # [tenth, heads]
    tenths = [part for part in order.tensor_split(SHARES) if len(part)]
    errors = torch.stack([error.gather(0, part).mean(0) for part in tenths])
    variances = torch.stack([variance.gather(0, part).mean(0) for part in tenths])
    place = torch.arange(1, len(tenths) + 1, dtype=torch.float64)
    ranked: dict[str, Any] = {"x": place, "x_label": "tenth of the tokens, by variance", "log_y": True}
    return [
        Panel(name="variance", y=variances, y_label="variance of the answer", **ranked),
        Panel(name="error", y=errors, y_label="squared error of the answer", **ranked),
    ]
