"""What a task asks of a model: the model that fits it, the loss of a batch, the measure on held-out sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from ...data import IGNORE_INDEX, Batch, RecallTask, Task, VectorTask
from ...evaluation.recall import right_and_asked
from ...evaluation.regression import vector_errors
from ...models import FastWeightsConfig, FastWeightsForCausalLM, VectorModel

__all__ = ["Measured", "Objective", "make_objective"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measurement on held-out sequences.

    Attributes:
        value: of the task's measure.
        best: what the best predictor has; None where that is the right answer.
        queries: how many answers an accuracy is measured on; None for another measure.
        by_token: columns of numbers by name, one per token or example; empty for a task that has none.
    """

    value: float
    best: float | None = None
    queries: int | None = None
    by_token: Mapping[str, list[float]] = field(default_factory=dict)


class Objective(Protocol):
    """A task, as the training sees it."""

    def build(self, config: FastWeightsConfig) -> Any:
        """The model, with first parameters from torch's random state."""

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """What `loss` reads of a batch of the task, on the CPU."""

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        """The mean loss of a batch, from its inputs on the device of the model."""

    def measure(self, model: Any, *, seed: int, examples: int, device: str) -> Measured:
        """The measure on `examples` held-out sequences."""


def make_objective(task: Task) -> Objective:
    """The objective of a task."""
    if isinstance(task, VectorTask):
        return _Predictions(task)
    if isinstance(task, RecallTask):
        return _Answers(task)
    raise TypeError(f"task must be a RecallTask or a VectorTask, got {type(task).__name__}")


@dataclass(frozen=True)
class _Answers:
    """Tokens in and out: cross-entropy and accuracy of the labelled positions."""

    task: RecallTask

    def build(self, config: FastWeightsConfig) -> FastWeightsForCausalLM:
        return FastWeightsForCausalLM(config)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        labels = batch.labels.flatten()
        (positions,) = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
        return batch.input_ids, positions, labels[positions]

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        input_ids, positions, labels = inputs
        hidden = model.model(input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        # Only labelled positions go through the output layer, most of a small model's cost where the vocabulary is large.
        return F.cross_entropy(model.lm_head(hidden[positions]), labels)

    def measure(self, model: Any, *, seed: int, examples: int, device: str) -> Measured:
        right_T, asked_T = right_and_asked(model, self.task, seed=seed, examples=examples, device=device)
        queries = int(asked_T.sum())
        accuracy = int(right_T.sum()) / queries
        if not self.task.by_token:
            return Measured(value=accuracy, queries=queries)
        tokens = [float(token) for token in range(1, len(right_T) + 1)]
        columns = {"token": tokens, "accuracy": (right_T / asked_T).tolist()}
        return Measured(value=accuracy, queries=queries, by_token=columns)


@dataclass(frozen=True)
class _Predictions:
    """Vectors in and out: squared error of the predictions at the tokens that the task asks."""

    task: VectorTask

    def build(self, config: FastWeightsConfig) -> VectorModel:
        return VectorModel(config, inputs=self.task.channels, outputs=self.task.outputs)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return batch.inputs, batch.targets

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        examples, targets = inputs
        return F.mse_loss(model(examples)[:, self.task.asked], targets)

    def measure(self, model: Any, *, seed: int, examples: int, device: str) -> Measured:
        errors = vector_errors(model, self.task, seed=seed, examples=examples, device=device)
        model_error, *others = (sum(values) / len(values) for values in errors.values())
        best = others[-1] if others else None
        if not self.task.by_token:
            return Measured(value=model_error, best=best)
        columns = {"example": [float(place) for place in range(1, len(errors["model"]) + 1)], "error": errors["model"]}
        columns |= {name: errors[name] for name in self.task.plotted_predictors}
        return Measured(value=model_error, best=best, by_token=columns)
