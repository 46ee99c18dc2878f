"""How long a memory keeps what is written to it."""

from __future__ import annotations

import torch

from .panels import Panel, over_time
from .reading import LayerReading

__all__ = ["memory_window"]


def memory_window(layer: LayerReading) -> list[Panel]:
    """N_t = 1 / (1 - a_t), the mean over the tokens since the last place (and over key channels). Palimpsa, section 2.2,
    figure 3."""
    if "g" not in layer.values:
        return []
    windows = 1 / (-torch.expm1(layer.values["g"])).clamp_min(torch.finfo(torch.float64).eps)
    windows = windows.flatten(2).mean(2) if windows.ndim > 2 else windows
    lengths = [end - start for start, end in zip([0, *layer.ends], layer.ends)]
    pieces = torch.stack([piece.mean(0) for piece in windows.split(lengths)])
    return [over_time("window", layer.ends, pieces, "memory window, tokens", log_y=True)]
