"""How long a memory keeps what is written to it, and how large it becomes."""

from __future__ import annotations

from itertools import pairwise

import torch

from .panels import Panel, make_curve
from .reading import LayerReading

__all__ = ["memory_window", "state_norms"]

MEANING = {
    "S": "memory |S|",
    "A": "penalty or key energy |A|",
    "H": "key Gram matrix |H|",
    "U": "memory |U|",
    "M": "precision-weighted mean |M|",
    "J": "importance |J|",
    "P": "inverse key Gram matrix |P|",
    "z": "sum of keys |z|",
}


def memory_window(layer: LayerReading) -> list[Panel]:
    """N_t = 1 / (1 - a_t), the mean over the tokens since the last place (and over key channels). Palimpsa, section 2.2,
    figure 3."""
    if "g" not in layer.values:
        return []
    windows = 1 / (-torch.expm1(layer.values["g"])).clamp_min(torch.finfo(torch.float64).eps)
    windows = windows.flatten(2).mean(2) if windows.ndim > 2 else windows
    lengths = [end - start for start, end in pairwise([0, *layer.ends])]
    pieces = torch.stack([piece.mean(0) for piece in windows.split(lengths)])
    return [make_curve("window", layer.ends, pieces, "memory window, tokens", log_y=True)]


def state_norms(layer: LayerReading) -> list[Panel]:
    """Frobenius norm of every tensor of the memory. Variational Linear Attention, figures 2b and 4."""
    return [
        make_curve(f"norm_{name}", layer.ends, state.flatten(2).norm(dim=2), MEANING.get(name, f"|{name}|"), log_y=True)
        for name, state in layer.states.items()
        if state.ndim > 2
    ]
