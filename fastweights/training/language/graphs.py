"""Forward and backward of a training step replayed as a CUDA graph: launching their kernels takes the host longer than they run.

Rows are packed from any number of documents, and a graph has fixed shapes. So the cumulative lengths get empty documents behind
them, up to a number that seldom changes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cuda_graphs import captured, refusing_waits
from .processes import largest_of_processes
from .run import LanguageRun

__all__ = ["GraphedGradients", "what_to_graph", "append_empty_documents"]

WARM = 3  # passes of a shape before it is captured, in which kernels are compiled and libraries make their workspaces
WARM_DDP = 11  # with DDP, which waits for the GPU in its first ten, to note how long its parts take
STEP = 16  # edges of documents are filled up to a multiple of this

Inputs = Mapping[str, Tensor]


def what_to_graph(run: LanguageRun) -> bool:
    """`run.graphs`; where it is None, whether a graph can be made."""
    if run.graphs is not None:
        return run.graphs
    return torch.cuda.is_available() and not run.settings_without_graphs


def append_empty_documents(cu_seqlens: Tensor, edges: int) -> Tensor:
    """cu_seqlens, int [N+1], with empty documents at the end, int [edges]."""
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(edges - len(cu_seqlens))])


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor
    gradients: list[Tensor | None]  # of the parameters: replays overwrite them, or add to them over several passes

    def takes(self, inputs: Inputs) -> bool:
        return all(inputs[name].shape == fixed.shape for name, fixed in self.inputs.items())

    def replay(self, inputs: Inputs) -> Tensor:
        for name, fixed in self.inputs.items():
            fixed.copy_(inputs[name], non_blocking=True)
        self.graph.replay()
        return self.loss.clone()


class GraphedGradients:
    """Adds the gradients of a batch to those of the parameters, by a graph from the fourth batch of its shape on.

    Graphs are those of the most documents so far: a graph keeps the memory of a step. Where the work cannot be captured, as where
    the host waits for the GPU within it, a warning says why, and every batch from then on is taken without a graph.

    In several processes the collectives of the work become part of the graph. All processes make theirs with the same batch.

    Args:
        parameters: those with gradients.
        work: forward and backward of a batch of tensors on the GPU; returns the loss.
        passes: batches per step. Gradients of the only one are left in the memory of the graph.
        required: ValueError in place of the warning, if the first graph cannot be made.
        warm: batches of a shape before it is captured.
        reduces: whether the next batch is the last of its step, after which processes add up their gradients. Such batches have
            a graph of their own.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        work: Callable[[Inputs], Tensor],
        *,
        passes: int = 1,
        required: bool = False,
        warm: int = WARM,
        reduces: Callable[[], bool] = lambda: True,
    ) -> None:
        self.parameters, self.work, self.passes, self.required = parameters, work, passes, required
        self.warm, self.reduces = warm, reduces
        self.edges = 0
        self.seen: Counter[Any] = Counter()
        self.graphs: dict[bool, Captured] = {}
        self.possible = True

    def __call__(self, inputs: Inputs) -> Tensor:
        """The loss of a batch."""
        if not self.possible:
            return self.work(inputs)
        inputs, reduces = self._fix_shape(inputs), self.reduces()
        graph = self.graphs.get(reduces)
        if graph is not None and graph.takes(inputs):
            return self._replay(graph, inputs)
        key = reduces, *sorted((name, x.shape) for name, x in inputs.items())
        self.seen[key] += 1
        if self.seen[key] > self.warm:
            self.graphs.pop(reduces, None)  # before the next one is made: both would not fit
            failed: RuntimeError | None = None
            try:
                graph = self._capture(inputs)
            except RuntimeError as error:  # one of the work itself comes again below
                failed = error
            if largest_of_processes(failed is not None):
                self._give_up(failed or RuntimeError("it failed in another process"))
            else:
                assert graph is not None
                self.graphs[reduces] = graph
                self.required = False  # no error where a larger one does not fit in the middle of a training
                return self._replay(graph, inputs)
        return self.work(inputs)

    def release(self) -> None:
        """Forget all graphs. NCCL waits for them when its processes end."""
        self.graphs.clear()

    def _give_up(self, error: RuntimeError) -> None:
        self.possible = False
        self.graphs.clear()
        why = f"a step cannot be captured as a CUDA graph: {error.__context__ or error}"  # first the error within the capture
        if self.required:
            raise ValueError(f"graphs must be False or None where {why}; leave it out to train without one") from error
        warnings.warn(f"training continues without CUDA graphs, because {why}", stacklevel=3)

    def _fix_shape(self, inputs: Inputs) -> dict[str, Tensor]:
        cu_seqlens = inputs.get("cu_seqlens")
        if cu_seqlens is None:
            return dict(inputs)
        edges = largest_of_processes(len(cu_seqlens))
        if edges > self.edges:  # a quarter more, for the batches to come
            self.edges = -(-5 * edges // (4 * STEP)) * STEP
            self.graphs.clear()  # never match again, and would keep the memory of a step beside the batches without one
        return {**inputs, "cu_seqlens": append_empty_documents(cu_seqlens, self.edges)}

    def _replay(self, graph: Captured, inputs: Inputs) -> Tensor:
        if self.passes > 1:
            self._sum_into(graph.gradients)
        loss = graph.replay(inputs)
        self._set(graph.gradients)
        return loss

    def _sum_into(self, sums: list[Tensor | None]) -> None:
        """Give these tensors the gradients of the passes before, which a replay adds to."""
        for parameter, total in zip(self.parameters, sums, strict=True):
            if total is None or total is parameter.grad:
                continue
            if parameter.grad is None:
                total.zero_()
            else:
                total.copy_(parameter.grad)

    def _capture(self, inputs: Inputs) -> Captured:
        """The graph of forward and backward; `Waits` where the host waits for the GPU within them. Gradients stay as they are."""
        fixed = {name: x.clone() for name, x in inputs.items()}
        before = [parameter.grad for parameter in self.parameters]
        self._set([None] * len(before))
        try:
            with refusing_waits():
                self.work(fixed)  # as a trial: nothing uses the gradients
            if self.passes == 1:
                self._set([None] * len(before))
            else:  # both graphs of a step add to the same tensors
                kept = next((graph.gradients for graph in self.graphs.values()), None)
                self._set(kept or [parameter.grad for parameter in self.parameters])
            graph, loss = captured(partial(self.work, fixed), self.parameters[0].device)
            gradients = [parameter.grad for parameter in self.parameters]
            # Replays would train nothing, without an error.
            assert any(gradient is not None for gradient in gradients), "a step gives its parameters no gradients"
            return Captured(graph, fixed, loss, gradients)
        finally:
            self._set(before)

    def _set(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
