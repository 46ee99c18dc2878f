"""How large the memory becomes."""

from __future__ import annotations

from .panels import Panel, over_time
from .reading import LayerReading

__all__ = ["state_norms"]

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


def state_norms(layer: LayerReading) -> list[Panel]:
    """Frobenius norm of every tensor of the memory. Variational Linear Attention, figures 2b and 4."""
    return [
        over_time(f"norm_{name}", layer.ends, state.flatten(2).norm(dim=2), MEANING.get(name, f"|{name}|"), log_y=True)
        for name, state in layer.states.items()
        if state.ndim > 2
    ]
