"""Decoding of one token per call by replaying a CUDA graph, which leaves the host almost no work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cuda_graphs import captured, warm_up
from ..kernels.runtime.overlap import can_overlap, overlapping_launches
from ..layers import LayerCache
from ..layers.mixer import Mixer
from ..layers.norms import normalize_sum
from ..layers.wrapped import is_unhooked
from ..ops.framework.few_tokens import overwriting_states
from ..private_torch import all_modules
from .kept_graphs import graphs_of, kind_of_call

__all__ = ["DecodeSteps", "can_replay"]

FEWEST = 8  # tokens to come that pay for capturing
OWN_BODY = "fastweights.models.modeling"  # whose forward a step repeats
SLOTS = 256  # of softmax attention that a captured step has a multiple of


def can_replay(model: Any) -> bool:
    """Whether calls of the model may be captured. This takes a GPU and no autocast, whose copies of the weights would be
    captured too. A replay does not run open probes, hooks or a forward that accelerate has wrapped, so that none of these may
    be there; nor the forward of a subclass of the body, whose blocks a step calls by itself."""
    return (
        model.device.type == "cuda"
        and not model.training
        and type(model.model).forward.__module__ == OWN_BODY
        and not torch.is_autocast_enabled("cuda")
        and all(
            is_unhooked(module) and not (isinstance(module, Mixer) and module._listener is not None)
            for module in all_modules(model)
        )
    )


class KeptStep(NamedTuple):
    """A captured step, with everything that its replays read and write.

    Attributes:
        key, serves, bytes: as in `Kept`.
        graph: None where steps are called (on a CPU, in tests).
        ids: [N, 1], the token ids that a replay reads.
        logits: [N, 1, vocab_size], what it writes.
        layers: the fixed caches that it reads and overwrites.
    """

    key: Hashable
    serves: Hashable
    graph: torch.cuda.CUDAGraph | None
    ids: Tensor
    logits: Tensor
    layers: list[LayerCache]
    bytes: int

    @property
    def device(self) -> torch.device:
        return self.ids.device


def kind_of_step(ids: Tensor, layers: list[LayerCache]) -> Hashable:
    """What a step reads: token ids of so many sequences, and ordinary caches with these entries. Those of padded prompts have
    others."""
    entries = tuple((*sorted(layer.memory), *sorted(layer.context)) for layer in layers)
    return kind_of_call("step", len(ids), ids.device, entries)


class DecodeSteps:
    """The calls of one `generate()` that read one token per sequence. The first of them makes the layers' caches fixed ones,
    and captures the graph, or takes that of an earlier call into whose caches these fit.

    Args:
        model: a FastWeightsForCausalLM.
        length: columns of the batch at the end, including those that the cache has read.
        find_key: gives `describe_model` of it; None where no step is kept.
        replayed: whether steps replay a CUDA graph; otherwise they do the same work without one.
    """

    def __init__(
        self, model: Any, length: int, find_key: Callable[[], Hashable] | None = None, replayed: bool = True
    ) -> None:
        self.model, self.length, self.find_key, self.replayed = model, length, find_key, replayed
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.layers: list[LayerCache] = []  # the fixed caches
        self.bytes = 0  # of these and the graph
        self.key: Hashable = None  # of a step that may be kept
        self.kind: Hashable = None  # `kind_of_step`
        self.keeps_form = True  # whether a step leaves the caches the form that they had

    def serve(self, ids: Tensor | None, layers: list[LayerCache], columns: int) -> bool:
        """Whether a call with these token ids is one of the steps. The first of them makes the caches in `layers` fixed."""
        tokens = self.length - columns
        if ids is None or ids.shape[1] != 1 or tokens < (FEWEST if self.logits is None else 1) or not self.keeps_form:
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

    def end(self, layers: list[LayerCache] | None) -> None:
        """Let later calls have the step. Make the caches in `layers` ordinary ones again, one layer at a time; None where nobody
        reads them any more."""
        is_kept = self._hand_back()
        if layers is None:
            return
        for index, mixer in enumerate(self._mixers()):
            if layers[index].fixed:
                layers[index] = mixer.free_cache(layers[index])
                if is_kept:  # later calls write into the tensors
                    layers[index].apply(Tensor.clone)

    def _hand_back(self) -> bool:
        """Whether later calls have the step."""
        is_kept = False
        if self.key is not None and self.logits is not None:
            step = KeptStep(self.key, self.kind, self.graph, self.ids, self.logits, self.layers, self.bytes)
            is_kept = graphs_of(self.model).put(step)
        self.graph = self.logits = None
        self.layers = []
        return is_kept

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
        """Of the layers that decode: the first ones alone where these draft."""
        return [block.mixer for block in self.model.model.layers[: self.model.config.num_hidden_layers]]

    def _start(self, ids: Tensor, layers: list[LayerCache], tokens: int) -> bool:
        """Make the caches fixed. False where the fixed caches do not fit into memory, or a step changes their form."""
        graphs, key = graphs_of(self.model), None if self.find_key is None else self.find_key()
        if self.kind is None:  # otherwise some of the layers are fixed, in a first try that ran out of memory
            self.kind = kind_of_step(ids, layers)
        kept = None if key is None else graphs.take(key, self.kind)
        if key is not None and graphs.refuses(self.kind):
            self.keeps_form = False
            return False
        spare = -self.length % SLOTS if self.replayed else 0
        try:
            kept = self._fix_caches(layers, tokens + spare, kept)
        except torch.OutOfMemoryError as error:
            if not len(graphs):
                warn_of_calls("memory does not hold the slots of the tokens to come", error)
                return False
            graphs.clear()
            return self._start(ids, layers, tokens)
        if kept is None:
            self.begin(ids, layers)
        else:
            self.graph, self.ids, self.logits, self.layers, self.bytes = kept[2:]
        if not self.keeps_form:
            self.logits = None
            graphs.refuse(self.kind)
            for index, mixer in enumerate(self._mixers()):
                layers[index] = mixer.free_cache(layers[index])
            return False
        if self.graph is not None or not self.replayed:
            self.key = key
        return True

    def _fix_caches(self, layers: list[LayerCache], tokens: int, kept: KeptStep | None) -> KeptStep | None:
        """Replace the caches by fixed ones, one layer at a time, so that only one layer needs memory twice: those of the kept
        step, which is returned, or new ones where one does not fit into it."""
        for index, mixer in enumerate(self._mixers()):
            if layers[index].fixed:
                continue  # in a first try that ran out of memory
            fixed = mixer.fixed_cache(layers[index], tokens)
            if kept is not None and not mixer.refill_cache(kept.layers[index], fixed):
                kept = None  # whose caches before this one are those of this call now
            layers[index] = fixed if kept is None else kept.layers[index]
        return kept

    def begin(self, ids: Tensor, layers: list[LayerCache]) -> None:
        """Capture a step over fixed caches, which stay as they are. Each replay reads the token ids in `self.ids`."""
        self.layers, self.ids = list(layers), ids.clone()
        self.bytes = sum(x.nbytes for layer in layers for held in (layer.memory, layer.context) for x in held.values())
        if self.replayed:
            before = torch.cuda.memory_reserved(ids.device)
            try:
                warm_up(lambda: self._step(keep=False), ids.device)
                if self.keeps_form:
                    self.graph, _ = captured(self._step, ids.device)
            except RuntimeError as error:
                warn_of_calls("a layer cannot be captured", error)
            self.bytes += max(0, torch.cuda.memory_reserved(ids.device) - before)
        if self.graph is None and self.keeps_form:
            self._step(keep=False)

    def _step(self, keep: bool = True) -> None:
        body = self.model.model
        x_N1D = body.embed_tokens(self.ids)
        with overlapping_launches(can_overlap(self.ids.device)), overwriting_states() if keep else nullcontext():
            first_values = None
            for block, fixed in zip(body.layers, self.layers, strict=True):
                cache = LayerCache(dict(fixed.memory), dict(fixed.context))
                first_values = body.find_values(block, x_N1D, first_values, {"past_key_values": cache})
                x_N1D = block(x_N1D, past_key_values=cache, first_values=first_values)
                if keep:
                    fixed.keep(cache)
                elif not cache.has_form_of(fixed):  # a memory that grows, without a `fixed_cache` of its own
                    self.keeps_form = False
            _, normed_N1D = normalize_sum(body.norm, x_N1D, None)
        self.logits = self.model.lm_head(normed_N1D)


def warn_of_calls(reason: str, error: RuntimeError) -> None:
    warnings.warn(f"generate() decodes without a CUDA graph, because {reason}: {error}", stacklevel=2)
