"""What the memories of a model do while it is trained on recall: a watch of `RecallExperiment.watch_every`."""

from __future__ import annotations

import statistics
from typing import Any

from fastweights.data import RecallTask
from fastweights.evaluation.reading import evaluating

from .memory import memory_window
from .posterior import metaplasticity
from .reading import read_layers

__all__ = ["watch_memories"]

WATCHED = {"window": memory_window, "metaplasticity ratio": metaplasticity}
SEQUENCES = 4


def watch_memories(model: Any, task: RecallTask, *, seed: int, device: str) -> dict[str, float]:
    """The memory window, averaged over a whole sequence, and the metaplasticity ratio after it: means over sequences, layers and
    heads, of the layers that have them."""
    found: dict[str, list[float]] = {}
    rows = task.batch("test", seed=seed, index=0, batch_size=SEQUENCES).input_ids.to(device)
    with evaluating(model):
        for ids in rows:
            for layer in read_layers(model, ids, every=len(ids)):
                for name, measure in WATCHED.items():
                    for panel in measure(layer):
                        found.setdefault(name, []).append(panel.y[-1].mean().item())
    return {name: statistics.fmean(values) for name, values in found.items()}
