"""Decoding of one token per call as a replay of a CUDA graph, which leaves next to nothing for the host to do."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..cuda_graphs import captured, refusing_waits
from ..layers import LayerCache
from ..layers.mixer import Mixer
from ..ops.framework.few_tokens import overwriting_states

__all__ = ["DecodeSteps", "can_replay"]

FEWEST = 8  # tokens to come that pay for capturing


def can_replay(model: Any) -> bool:
    """Whether calls of the model may be captured: on a GPU, without autocast, whose copies of weights would be captured too,
    without hooks of accelerate, which move weights, and without open probes."""
    return (
        model.device.type == "cuda"
        and not model.training
        and not torch.is_autocast_enabled("cuda")
        and not any(
            hasattr(module, "_hf_hook") or (isinstance(module, Mixer) and module._listener is not None)
            for module in model.modules()
        )
    )


class DecodeSteps:
    """The calls of one `generate()` that read one token per sequence. The graph is captured at the first of them; from then
    on the layers' caches are fixed ones.

    Args:
        model: a FastWeightsForCausalLM.
        length: columns of the batch at the end, those included that the cache has read.
        replayed: False for the same work without a graph.
    """

    def __init__(self, model: Any, length: int, replayed: bool = True) -> None:
        self.model, self.length, self.replayed = model, length, replayed
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def serves(self, ids: Tensor | None, columns: int) -> bool:
        """Whether a call with these token ids is one of the steps."""
        fewest = FEWEST if self.logits is None else 1
        return ids is not None and ids.shape[1] == 1 and self.length - columns >= fewest

    def __call__(self, ids: Tensor, layers: list[LayerCache], columns: int) -> Tensor:
        """Logits [N, 1, vocab_size] after one token more; `layers` are brought up to date, and made fixed by the first call."""
        if self.logits is None:
            self._start(ids, layers, self.length - columns)
        self.ids.copy_(ids)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        assert self.logits is not None
        return self.logits.clone()

    def end(self, layers: list[LayerCache]) -> None:
        """Make the caches ordinary ones again."""
        if self.logits is not None:
            layers[:] = [mixer.free_cache(layer) for mixer, layer in zip(self._mixers(), layers, strict=True)]
        self.graph = self.logits = None

    def _mixers(self) -> list[Mixer]:
        return [block.mixer for block in self.model.model.layers]

    def _start(self, ids: Tensor, layers: list[LayerCache], tokens: int) -> None:
        layers[:] = [mixer.fixed_cache(layer, tokens) for mixer, layer in zip(self._mixers(), layers, strict=True)]
        self.begin(ids, layers)

    def begin(self, ids: Tensor, layers: list[LayerCache]) -> None:
        """Capture a step over fixed caches. It leaves them as they are; every call of `graph.replay` reads `self.ids`."""
        self.layers, self.ids = layers, ids.clone()
        if not self.replayed:
            self._step(keep=False)
            return
        try:
            self._warm_up(ids.device)
            self.graph, _ = captured(self._step, ids.device)
        except RuntimeError as error:
            warnings.warn(
                f"generate() decodes without a CUDA graph, because a layer cannot be captured: {error}", stacklevel=2
            )
            self._step(keep=False)

    def _warm_up(self, device: torch.device) -> None:
        """Compile the kernels and choose those of matrix products; then `Waits` where a layer waits for the device."""
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
            for block, fixed in zip(body.layers, self.layers, strict=True):
                cache = LayerCache(dict(fixed.memory), dict(fixed.context))
                x_N1D = block(x_N1D, past_key_values=cache)
                if keep:
                    fixed.keep(cache)
        self.logits = self.model.lm_head(body.norm(x_N1D))
