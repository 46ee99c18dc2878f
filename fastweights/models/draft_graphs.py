"""Drafted tokens, read by replaying a CUDA graph, which leaves the host almost no work.

A graph has a fixed number of tokens. It reads the tokens of one sequence from a state, and padding behind them as a sequence of
its own, of which nothing is kept. A cache that records (`RecordingCache`) often returns to the same checkpoint: the state is
copied to where the graph reads it only after the checkpoint has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cuda_graphs import captured, warm_up
from ..layers import LayerCache, Mixer, SoftmaxAttention
from ..layers.attention import unread_lengths
from ..private_torch import copy_all
from .cache import FastWeightsCache
from .kept_graphs import graphs_of, kind_of_call, may_refuse_packed
from .rows import own_columns

__all__ = ["DraftReader"]

WIDTHS = (16, 64)  # tokens of a graph: a few drafts, and drafts behind columns that are read again
SLOTS = 512  # of softmax attention that a graph has a multiple of
MOST_SLOTS = 8192  # more take longer to copy than a call of the model to launch


@dataclass(eq=False)
class KeptDrafts:
    """A reading of the tokens of one sequence, with everything that its replays read and write.

    Attributes:
        key, serves, bytes: as in `Kept`.
        ids: [1, T], the tokens, then padding.
        edges: int64 [3], cumulative lengths of the tokens and the padding.
        before: the caches of both sequences, from which every replay begins. That of the padding is zero.
        graph: None where the model is called (on a CPU, in tests).
        hidden: [1, T, D] after the final norm.
        after: the caches behind the tokens. Each reading overwrites them.
        begins, ends: the parts of the sequence in all tensors of `before` and of `after`, see `held_tensors`.
        filled_by: what was said when `begins` was filled last.
    """

    key: Hashable
    serves: Hashable
    ids: Tensor
    edges: Tensor
    before: list[LayerCache]
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None
    after: list[LayerCache] = field(default_factory=list)
    begins: list[Tensor] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    filled_by: object = None

    @property
    def device(self) -> torch.device:
        return self.ids.device


class DraftReader:
    """Reads what a cache is given between `activate_past_recording` and the end of an assisted `generate()`. Keys and values of
    softmax layers lie in slots meanwhile (`Mixer.slotted_cache`), so that a state does not change its size.

    Args:
        model: a FastWeightsForCausalLM.
        find_key: gives `describe_model` of it.
        replayed: whether readings replay a CUDA graph; otherwise they do the same work without one.
    """

    def __init__(self, model: Any, find_key: Callable[[], Hashable], replayed: bool = True) -> None:
        self.model, self.find_key, self.replayed = model, find_key, replayed
        mixers = [block.mixer for block in model.model.layers]
        slotted = [mixer.grows() or isinstance(mixer, SoftmaxAttention) for mixer in mixers]  # also with narrow windows
        self.growing = [(index, mixer) for index, mixer in enumerate(mixers) if slotted[index]]
        self.serves: dict[tuple[int, int], Hashable] = {}  # by width and slots
        self.slots = 0  # that keys and values have
        # What was said when states were last copied to where a graph reads them, and these states.
        self.filled: tuple[object, list[Tensor]] = (None, [])

    def read(self, ids: Tensor | None, mask: Tensor | None, cache: FastWeightsCache) -> Tensor | None:
        """Hidden states [1, T, D] of tokens [1, T] behind those of the cache, which has then read them. None where they come in
        another form, padding is among them, or the model cannot be captured."""
        kept = None
        if ids is not None and self._takes(ids, mask, cache) and self.take_slots(cache):
            kept = self._find(next(width for width in WIDTHS if ids.shape[1] <= width), cache.layers)
        if ids is None or kept is None:
            self.leave_slots(cache)
            return None
        time = ids.shape[1]
        kept.ids[:, :time].copy_(ids)
        kept.edges[1].fill_(time)
        self._fill(kept, held_tensors(cache.layers))
        if kept.graph is not None:
            kept.graph.replay()
        else:
            self._call(kept)
        assert kept.hidden is not None
        hidden, states = kept.hidden[:, :time].clone(), [torch.empty_like(x) for x in kept.ends]
        copy_all(states, kept.ends)
        cache.layers = with_tensors(kept.after, states)
        cache.advance(time, None, None)
        if not graphs_of(self.model).put(kept):  # it would be captured anew in every call
            graphs_of(self.model).refuse(kept.serves)
        return hidden

    def take_slots(self, cache: FastWeightsCache) -> bool:
        """Lay keys and values out in slots, enough for another reading. False where there are too many."""
        slots = -(-(cache.columns + WIDTHS[-1]) // SLOTS) * SLOTS if self.growing else 0
        if slots > MOST_SLOTS:
            return False
        layers = list(cache.layers)
        for index, mixer in self._growing(cache):
            layer = mixer.slotted_cache(layers[index], slots)
            if layer is None:
                return False
            layers[index] = layer
        cache.layers, self.slots = layers, slots
        return True

    def leave_slots(self, cache: FastWeightsCache) -> None:
        """Make the layers' caches ordinary ones again."""
        for index, mixer in self._growing(cache):
            cache.layers[index] = mixer.free_cache(cache.layers[index])

    def _growing(self, cache: FastWeightsCache) -> list[tuple[int, Mixer]]:
        """The layers whose memory grows, among those that the cache has: as many as draft."""
        return [(index, mixer) for index, mixer in self.growing if index < len(cache.layers)]

    def _takes(self, ids: Tensor, mask: Tensor | None, cache: FastWeightsCache) -> bool:
        """Whether these are tokens of one sequence whose beginning the cache has read."""
        if not cache.is_initialized or len(ids) != 1 or not 0 < ids.shape[1] <= WIDTHS[-1]:
            return False
        return mask is None or bool(own_columns(mask, ids.shape[1]).all())

    def _fill(self, kept: KeptDrafts, states: list[Tensor]) -> None:
        """Let the next replay begin from these states, unless the last one did."""
        said, before = self.filled
        if said is not None and kept.filled_by is said and all(x is y for x, y in zip(states, before, strict=True)):
            return
        copy_all(kept.begins, states)
        kept.filled_by = object()
        self.filled = kept.filled_by, states

    def _find(self, width: int, layers: list[LayerCache]) -> KeptDrafts | None:
        """A reading of `width` tokens behind such caches."""
        key, graphs = self.find_key(), graphs_of(self.model)
        if key is None:
            return None
        if (width, self.slots) not in self.serves:
            forms = tuple((name, shape[1:], dtype) for layer in layers for name, shape, dtype, _ in layer.describe())
            device = held_tensors(layers)[0].device
            self.serves[width, self.slots] = kind_of_call("drafts", width, len(layers), device, forms)
        serves = self.serves[width, self.slots]
        kept = graphs.take(key, serves)
        if kept is not None or graphs.refuses(serves):
            return kept
        held = held_tensors(layers)
        before = with_tensors(layers, [torch.cat([x, torch.zeros_like(x)]) for x in held])
        device = held[0].device
        ids, edges = torch.zeros(1, width, dtype=torch.long, device=device), torch.tensor([0, 1, width], device=device)
        kept = KeptDrafts(key, serves, ids, edges, before, begins=[x[:1] for x in held_tensors(before)])
        if self._capture(kept):
            return kept
        graphs.refuse(serves)
        return None

    @torch.no_grad()
    def _capture(self, kept: KeptDrafts) -> bool:
        """False where the model waits for the GPU, may read these tokens in another form alone, memory does not hold the graph,
        or a cache does not keep its form."""
        kept.bytes = kept.ids.nbytes + sum(x.nbytes for x in held_tensors(kept.before))
        before = torch.cuda.memory_reserved(kept.device) if self.replayed else 0
        try:
            if self.replayed:
                warm_up(lambda: self._call(kept), kept.device)
                kept.graph, _ = captured(lambda: self._call(kept), kept.device)
                kept.bytes += max(0, torch.cuda.memory_reserved(kept.device) - before)
            else:
                self._call(kept)
        except Exception as error:
            if (self.replayed and isinstance(error, RuntimeError)) or may_refuse_packed(self.model, error):
                return False
            raise
        return all(one.describe() == other.describe() for one, other in zip(kept.before, kept.after, strict=True))

    @torch.no_grad()
    def _call(self, kept: KeptDrafts) -> None:
        cache = FastWeightsCache([layer.copy() for layer in kept.before])
        with unread_lengths(kept.ids.shape[1]):
            output = self.model.model(kept.ids, past_key_values=cache, use_cache=True, cu_seqlens=kept.edges)
        kept.hidden, kept.after = output.last_hidden_state, cache.layers
        kept.ends = [x[:1] for x in held_tensors(kept.after)]


def held_tensors(layers: list[LayerCache]) -> list[Tensor]:
    """All tensors of some caches, by name in each layer."""
    return [held[name] for layer in layers for held in (layer.memory, layer.context) for name in sorted(held)]


def with_tensors(layers: list[LayerCache], tensors: list[Tensor]) -> list[LayerCache]:
    """Caches like these of other tensors, in the order of `held_tensors`."""
    new = iter(tensors)
    found = []
    for layer in layers:
        memory, context = ({name: next(new) for name in sorted(held)} for held in (layer.memory, layer.context))
        found.append(LayerCache(memory, context))
    return found
