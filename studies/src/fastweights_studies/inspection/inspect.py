"""What the memories of a trained model do while it reads a text: every measure that fits each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastweights.checks import check_choice, check_size
from fastweights.evaluation.reading import check_model
from fastweights.kinds import checked

from .keys import gates, key_gram, preconditioner
from .memory import memory_window, state_norms
from .panels import Panel
from .posterior import calibration, metaplasticity
from .reading import LayerReading, read_layers
from .slots import slots
from .solver import condition, gradient_error, reversal_divisors, solver_residuals
from .transitions import jacobians, write_eigenvalues

__all__ = ["MEASURES", "Inspection", "Measure", "inspect_model"]


@checked
@dataclass(frozen=True)
class Measure:
    """A measure by name.

    Attributes:
        title: what a report calls it.
        source: paper and figure.
        of_layer: panels of one layer, none where the measure does not fit it; None for `gradients`, which needs the model.
    """

    title: str
    source: str
    of_layer: Callable[[LayerReading], list[Panel]] | None


MEASURES = {
    "window": Measure("Memory window N = 1 / (1 - decay)", "Palimpsa, figure 3", memory_window),
    "norms": Measure("Norms of the memory", "Variational Linear Attention, figures 2b and 4", state_norms),
    "jacobians": Measure(
        "Norms of the memory's transitions", "Variational Linear Attention, table 2; Preconditioned DeltaNet, appendix E.2",
        jacobians,
    ),
    "writes": Measure("Write eigenvalues", "Preconditioned DeltaNet, figures 7, 15 and 16", write_eigenvalues),
    "keys": Measure("Key Gram matrix", "Preconditioned DeltaNet, figure 1", key_gram),
    "preconditioner": Measure("Key preconditioner", "Preconditioned DeltaNet, figures 2 and 11 to 13", preconditioner),
    "gates": Measure("Decays and gains", "Preconditioned DeltaNet, figure 14", gates),
    "metaplasticity": Measure("Metaplasticity ratio", "Palimpsa, figure 3", metaplasticity),
    "calibration": Measure("Variance against error", "Palimpsa, section 2.3", calibration),
    "condition": Measure("Condition number of the regression", "Gated KalmaNet, section 4.1", condition),
    "residuals": Measure("Residual by iteration", "Gated KalmaNet, figures 1a and 8", solver_residuals),
    "divisors": Measure("Divisors of a reversed solver", "Gated KalmaNet, figure 5", reversal_divisors),
    "gradients": Measure("Gradient error of the solver", "Gated KalmaNet, figures 1b to 1e", None),
    "slots": Measure("Slots: overlap and novelty", "Lattice, sections 3 and 5", slots),
}  # fmt: skip


@checked
@dataclass
class Inspection:
    """The panels of every measure and layer.

    Attributes:
        panels: by measure and layer number; measures that fit no layer are missing.
        layers: what each layer is called, by its number.
        tokens: number of tokens read.
    """

    panels: dict[str, dict[int, list[Panel]]] = field(default_factory=dict)
    layers: dict[int, str] = field(default_factory=dict)
    tokens: int = 0


@checked
def inspect_model(
    model: Any, ids: Sequence[int] | Tensor, *, every: int = 64, measures: Sequence[str] | None = None
) -> Inspection:
    """Read a text with a model and measure its memories.

    Args:
        model: a `FastWeightsForCausalLM`; it is left in the mode it was in.
        ids: token ids [T] of the text, at least 2.
        every: tokens between two places in the text at which the memory is looked at.
        measures: names in `MEASURES`; all of them when None.

    Raises:
        TypeError: another model, or arguments of a wrong kind.
        ValueError: a name that is no measure, fewer than 2 tokens, or ids outside the model's vocabulary.
    """
    check_model(model)
    check_size("every", every)
    names = list(MEASURES if measures is None else measures)
    for name in names:
        check_choice("measures", name, tuple(MEASURES))
    ids_T = torch.as_tensor(ids, device=model.device)
    vocabulary = model.config.vocab_size
    if ids_T.ndim != 1 or len(ids_T) < 2 or ids_T.is_floating_point():
        raise ValueError(f"ids must be at least 2 token ids in one dimension, got {list(ids_T.shape)} of {ids_T.dtype}")
    if int(ids_T.min()) < 0 or int(ids_T.max()) >= vocabulary:
        raise ValueError(
            f"ids must be from 0 to {vocabulary - 1}, the model's vocabulary, got {int(ids_T.min())} to {int(ids_T.max())}; "
            "use the tokenizer that the model was trained with"
        )
    training = model.training
    model.eval()
    try:
        readings = read_layers(model, ids_T, every)
        found = Inspection(tokens=len(ids_T))
        found.layers = {index: f"layer {index}, {mixer}" for index, (mixer, _) in enumerate(model.config.mixers())}
        for name in names:
            of_layer = MEASURES[name].of_layer
            if of_layer is None:
                panels = gradient_error(model, readings, ids_T)
            else:
                panels = {reading.index: own for reading in readings if (own := of_layer(reading))}
            if panels:
                found.panels[name] = panels
    finally:
        model.train(training)
    return found
