"""One reading of a text by a model, with what every memory layer computed on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.layers import probe
from fastweights.layers.mixer import Mixer

__all__ = ["LayerReading", "read_layers"]

# Results that only the layer's own output needs.
NOT_READ = ("output_gate",)


@dataclass(frozen=True)
class LayerReading:
    """What one layer computed while it read T tokens.

    Attributes:
        index: place among the mixers of the model, from 0.
        name: module name.
        mixer: the layer.
        ends: number of tokens read at each of P places.
        values: results by their names in `fastweights.layers.probe`, [T, heads, ...] ("ridge" has no T), float64, on the CPU.
        states: the memory by name at the places, [P, heads, ...], float64, on the CPU.
    """

    index: int
    name: str
    mixer: Any
    ends: list[int]
    values: dict[str, Tensor]
    states: dict[str, Tensor]

    @property
    def heads(self) -> int:
        """Number of memories: the value heads."""
        return self.values["v"].shape[1]

    def per_head(self, name: str) -> Tensor:
        """A result [T, heads, ...], repeated where one q/k head serves several memories."""
        value = self.values[name]
        return value.repeat_interleave(self.heads // value.shape[1], 1)

    def select_ends(self, value: Tensor) -> Tensor:
        """Of a result [T, ...], that of the last token of each place: [P, ...]."""
        return value[torch.tensor(self.ends) - 1]


def read_layers(model: nn.Module, ids_T: Tensor, every: int) -> list[LayerReading]:
    """Read the tokens [T] as one sequence. every: tokens between two states."""
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    names = list(dict.fromkeys(name for mixer in mixers for name in mixer.probe_names() if name not in NOT_READ))
    with torch.no_grad(), probe(model, *names, every=every) as seen:
        model(ids_T[None])
    readings = []
    for index, mixer in enumerate(mixers):
        values = {
            name: _drop_batch(found[index], name) for name, found in seen.items() if name != "state" and index in found
        }
        states = {name: _drop_batch(state, name) for name, state in seen.get("state", {}).get(index, {}).items()}
        readings.append(LayerReading(index, seen.layers[index], mixer, seen.ends, values, states))
    return readings


def _drop_batch(value: Any, name: str) -> Tensor:
    """Of the batch its only row."""
    return (value if name == "ridge" else value[0]).double().cpu()
