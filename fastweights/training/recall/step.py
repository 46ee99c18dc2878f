"""An optimizer step of a recall training. On a GPU it is replayed as a CUDA graph: these models are so small that launching
their kernels one by one takes longer than running them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cuda_graphs import Waits, captured, refusing_waits
from ...private_torch import silence_uncaptured_steps
from ..optimization import weight_decay_groups
from .objectives import Objective

__all__ = ["TrainingStep"]

WARM = 3  # steps of a shape before it is captured, in which kernels are compiled and libraries make their workspaces
MOST_GRAPHS = 16  # each keeps the memory of a step


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        for fixed, x in zip(self.inputs, inputs, strict=True):
            fixed.copy_(x.pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.loss


class TrainingStep:
    """Forward, backward, clipped gradients, AdamW. Inputs of another shape, as in another stage, get a graph of their own. A
    model that waits for the device within a step cannot be captured; its steps are taken as on the CPU.

    Args:
        model: on its device.
        betas, weight_decay: of AdamW.
        max_gradient_norm: gradients are scaled down to it.
        uses_graphs: False for the same work without them.

    Attributes:
        gradient_norm: of the last step, before the gradients were scaled down.
    """

    gradient_norm: Tensor

    def __init__(
        self, model: torch.nn.Module, *, betas: tuple[float, float], weight_decay: float, max_gradient_norm: float,
        uses_graphs: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.max_gradient_norm = model, max_gradient_norm
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.uses_graphs = uses_graphs and on_gpu
        # A graph reads the rate from the GPU.
        self.rate = torch.zeros((), device=self.device) if on_gpu else None
        groups = weight_decay_groups(model, weight_decay)
        self.optimizer = torch.optim.AdamW(groups, betas=betas, fused=True, capturable=on_gpu)
        silence_uncaptured_steps(self.optimizer)
        self.seen: Counter[Hashable] = Counter()
        self.graphs: dict[Hashable, Captured | None] = {}

    def __call__(self, objective: Objective, batch: Any, learning_rate: float) -> Tensor:
        """The loss before the step, on the device."""
        self._set_rate(learning_rate)
        inputs = objective.inputs(batch)
        graph = self._graph(objective, inputs) if self.uses_graphs else None
        if graph is not None:
            return graph.replay(inputs)
        return self._take(objective, [x.to(self.device) for x in inputs])

    def state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from an earlier `state()`. Before the first step: graphs keep the places of what they were captured with."""
        assert not self.graphs
        self.optimizer.load_state_dict(dict(state))
        for group in self.optimizer.param_groups:
            group["capturable"] = self.rate is not None  # not in states of earlier versions

    def _set_rate(self, learning_rate: float) -> None:
        if self.rate is not None:
            self.rate.fill_(learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate if self.rate is None else self.rate

    def _take(self, objective: Objective, inputs: Sequence[Tensor]) -> Tensor:
        loss = self._gradients(objective, inputs)
        self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_gradient_norm)
        self.optimizer.step()
        return loss.detach()

    def _gradients(self, objective: Objective, inputs: Sequence[Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = objective.loss(self.model, *inputs)
        loss.backward()
        return loss

    def _graph(self, objective: Objective, inputs: Sequence[Tensor]) -> Captured | None:
        shape = id(objective), *(x.shape for x in inputs)
        self.seen[shape] += 1
        if shape not in self.graphs and self.seen[shape] > WARM and len(self.graphs) < MOST_GRAPHS:
            self.graphs[shape] = self._capture(objective, [x.to(self.device) for x in inputs])
        return self.graphs.get(shape)

    def _capture(self, objective: Objective, inputs: list[Tensor]) -> Captured | None:
        """The graph of a step, which is taken when it is replayed; None where the host waits for the GPU within it."""
        try:
            with refusing_waits():
                self._gradients(objective, inputs)  # as a trial: nothing uses them
        except Waits:
            return None
        graph, loss = captured(partial(self._take, objective, inputs), self.device)
        return Captured(graph, inputs, loss)
