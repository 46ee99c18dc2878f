"""Decoding of one token per call by replaying a CUDA graph, which leaves the host almost no work."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..cuda_graphs import captured, refusing_waits
from ..layers import LayerCache
from ..layers.mixer import Mixer
from ..layers.wrapped import is_unhooked
from ..ops.framework.few_tokens import overwriting_states

__all__ = ["DecodeSteps", "can_replay"]

FEWEST = 8  # tokens to come that pay for capturing


def can_replay(model: Any) -> bool:
    """Whether calls of the model may be captured. This takes a GPU and no autocast, whose copies of the weights would be
    captured too. A replay does not run open probes, hooks or a forward that accelerate has wrapped, so that none of these may
    be there."""
    return (
        model.device.type == "cuda"
        and not model.training
        and not torch.is_autocast_enabled("cuda")
        and all(
            is_unhooked(module) and not (isinstance(module, Mixer) and module._listener is not None)
            for module in model.modules()
        )
    )


class DecodeSteps:
    """The calls of one `generate()` that read one token per sequence. The first of them captures the graph and makes the
    layers' caches fixed ones.

    Args:
        model: a FastWeightsForCausalLM.
        length: columns of the batch at the end, including those that the cache has read.
        replayed: whether steps replay a CUDA graph; otherwise they do the same work without one.
    """

    def __init__(self, model: Any, length: int, replayed: bool = True) -> None:
        self.model, self.length, self.replayed = model, length, replayed
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def serve(self, ids: Tensor | None, layers: list[LayerCache], columns: int) -> bool:
        """Whether a call with these token ids is one of the steps. The first of them makes the caches in `layers` fixed."""
        tokens = self.length - columns
        if ids is None or ids.shape[1] != 1 or tokens < (FEWEST if self.logits is None else 1):
            return False
        return self.logits is not None or self._start(ids, layers, tokens)

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [N, 1, vocab_size] after one more token of a call that the steps `serve`. The fixed caches are updated."""
        self.ids.copy_(ids)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        assert self.logits is not None
        return self.logits.clone()

    def end(self, layers: list[LayerCache]) -> None:
        """Make the caches ordinary ones again, one layer at a time."""
        self.graph = self.logits = None
        for index, mixer in enumerate(self._mixers()):
            if layers[index].fixed:
                layers[index] = mixer.free_cache(layers[index])

    def copy_caches(self, layers: list[LayerCache]) -> list[LayerCache]:
        """Ordinary copies of the caches, into which no step writes."""
        copied = []
        for mixer, layer in zip(self._mixers(), layers, strict=True):
            if layer.fixed:
                layer = mixer.free_cache(layer)
                layer.apply(Tensor.clone)
            copied.append(layer)
        return copied

    def _mixers(self) -> list[Mixer]:
        return [block.mixer for block in self.model.model.layers]

    def _start(self, ids: Tensor, layers: list[LayerCache], tokens: int) -> bool:
        """Make the caches fixed, one layer at a time, so that only one layer needs memory twice. False where the fixed caches
        do not fit into memory."""
        try:
            for index, mixer in enumerate(self._mixers()):
                layers[index] = mixer.fixed_cache(layers[index], tokens)
        except torch.OutOfMemoryError as error:
            warn_of_calls("memory does not hold the slots of the tokens to come", error)
            return False
        self.begin(ids, layers)
        return True

    def begin(self, ids: Tensor, layers: list[LayerCache]) -> None:
        """Capture a step over fixed caches, which stay as they are. Each replay reads the token ids in `self.ids`."""
        self.layers, self.ids = layers, ids.clone()
        if self.replayed:
            try:
                self._warm_up(ids.device)
                self.graph, _ = captured(self._step, ids.device)
            except RuntimeError as error:
                warn_of_calls("a layer cannot be captured", error)
        if self.graph is None:
            self._step(keep=False)

    def _warm_up(self, device: torch.device) -> None:
        """Compile the kernels and choose those of matrix products. Raises `Waits` where a layer waits for the device."""
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            self._step(keep=False)
            with refusing_waits():
                self._step(keep=False)
        torch.cuda.current_stream(device).wait_stream(aside)

    def _step(self, keep: bool = True) -> None:
        body = self.model.model
        x_N1D = body.embed_tokens(self.ids)
        with overwriting_states() if keep else nullcontext():
            first_values = None
            for block, fixed in zip(body.layers, self.layers, strict=True):
                cache = LayerCache(dict(fixed.memory), dict(fixed.context))
                first_values = body.find_values(block, x_N1D, first_values, {"past_key_values": cache})
                x_N1D = block(x_N1D, past_key_values=cache, first_values=first_values)
                if keep:
                    fixed.keep(cache)
        self.logits = self.model.lm_head(body.norm(x_N1D))


def warn_of_calls(reason: str, error: RuntimeError) -> None:
    warnings.warn(f"generate() decodes without a CUDA graph, because {reason}: {error}", stacklevel=2)
