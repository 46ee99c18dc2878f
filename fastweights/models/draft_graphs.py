"""Drafted tokens, read by replaying a CUDA graph, which leaves the host almost no work.

A graph has a fixed number of tokens. It reads the tokens of one sequence from a state, and padding behind them as a sequence of
its own, of which nothing is kept. A cache that records (`RecordingCache`) often returns to the same checkpoint: the state is
copied to where the graph reads it only after the checkpoint has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cuda_graphs import captured, refusing_waits
from ..layers import LayerCache
from ..layers.attention import unread_lengths
from ..private_torch import copy_all
from .cache import FastWeightsCache
from .kept_graphs import graphs_of
from .rows import own_columns

__all__ = ["DraftReader"]

WIDTHS = (16, 64)  # tokens of a graph: a few drafts, and drafts behind columns that are read again


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
        filled_by: what was said when `before` was filled last.
    """

    key: Hashable
    serves: Hashable
    ids: Tensor
    edges: Tensor
    before: list[LayerCache]
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None
    after: list[LayerCache] | None = None
    bytes: int = 0
    filled_by: object = None

    @property
    def device(self) -> torch.device:
        return self.ids.device


class DraftReader:
    """Reads what a cache is given between `activate_past_recording` and the end of an assisted `generate()`, where the memory of
    every layer has a constant size.

    Args:
        model: a FastWeightsForCausalLM.
        find_key: gives `describe_model` of it.
        replayed: whether readings replay a CUDA graph; otherwise they do the same work without one.
    """

    def __init__(self, model: Any, find_key: Callable[[], Hashable], replayed: bool = True) -> None:
        self.model, self.find_key, self.replayed = model, find_key, replayed
        # What was said when states were last copied to where a graph reads them, and these states.
        self.filled: tuple[object, list[Tensor]] = (None, [])

    def read(self, ids: Tensor, mask: Tensor | None, cache: FastWeightsCache) -> Tensor | None:
        """Hidden states [1, T, D] of tokens [1, T] behind those of the cache, which has then read them. None where they come in
        another form, padding is among them, or the model cannot be captured."""
        time = ids.shape[1]
        if not cache.is_initialized or len(ids) != 1 or not 0 < time <= WIDTHS[-1]:
            return None
        if mask is not None and not own_columns(mask, time).all():
            return None
        kept = self._find(next(width for width in WIDTHS if time <= width), cache.layers)
        if kept is None:
            return None
        kept.ids[:, :time].copy_(ids)
        kept.edges[1].fill_(time)
        self._fill(kept, held_tensors(cache.layers))
        if kept.graph is not None:
            kept.graph.replay()
        else:
            self._call(kept)
        assert kept.hidden is not None and kept.after is not None
        hidden, layers = kept.hidden[:, :time].clone(), [layer.copy() for layer in kept.after]
        found = [x[:1] for x in held_tensors(layers)]
        copies = [torch.empty_like(x) for x in found]
        copy_all(copies, found)
        replace_tensors(layers, copies)
        cache.layers = layers
        cache.advance(time, None, None)
        graphs_of(self.model).put(kept)
        return hidden

    def _fill(self, kept: KeptDrafts, states: list[Tensor]) -> None:
        """Let the next replay begin from these states, unless the last one did."""
        said, before = self.filled
        if said is not None and kept.filled_by is said and all(x is y for x, y in zip(states, before, strict=True)):
            return
        copy_all([x[:1] for x in held_tensors(kept.before)], states)
        kept.filled_by = object()
        self.filled = kept.filled_by, states

    def _find(self, width: int, layers: list[LayerCache]) -> KeptDrafts | None:
        """A reading of `width` tokens behind such caches."""
        key, graphs, ids = self.find_key(), graphs_of(self.model), None
        if key is None:
            return None
        forms = tuple((name, shape[1:], dtype) for layer in layers for name, shape, dtype, _ in layer.describe())
        device = next(iter(held_tensors(layers))).device
        serves = ("drafts", width, len(layers), device, forms)
        kept = graphs.take(key, serves)
        if kept is not None or graphs.refuses(serves):
            return kept
        ids = torch.zeros(1, width, dtype=torch.long, device=device)
        before = [layer.copy() for layer in layers]
        replace_tensors(before, [torch.cat([x, torch.zeros_like(x)]) for x in held_tensors(before)])
        kept = KeptDrafts(key, serves, ids, torch.tensor([0, 1, width], device=device), before)
        if self._capture(kept):
            return kept
        graphs.refuse(serves)
        return None

    @torch.no_grad()
    def _capture(self, kept: KeptDrafts) -> bool:
        """False where the model waits for the GPU, memory does not hold the graph, or a cache does not keep its form."""
        kept.bytes = kept.ids.nbytes + sum(x.nbytes for x in held_tensors(kept.before))
        if self.replayed:
            before, aside = torch.cuda.memory_reserved(kept.device), torch.cuda.Stream(kept.device)
            try:
                aside.wait_stream(torch.cuda.current_stream(kept.device))
                with torch.cuda.stream(aside):
                    self._call(kept)  # compiles the kernels
                    with refusing_waits():
                        self._call(kept)
                torch.cuda.current_stream(kept.device).wait_stream(aside)
                kept.graph, _ = captured(lambda: self._call(kept), kept.device)
            except RuntimeError:
                return False
            kept.bytes += max(0, torch.cuda.memory_reserved(kept.device) - before)
        else:
            self._call(kept)
        assert kept.after is not None
        return all(one.describe() == other.describe() for one, other in zip(kept.before, kept.after, strict=True))

    @torch.no_grad()
    def _call(self, kept: KeptDrafts) -> None:
        cache = FastWeightsCache([layer.copy() for layer in kept.before])
        with unread_lengths(kept.ids.shape[1]):
            output = self.model.model(kept.ids, past_key_values=cache, use_cache=True, cu_seqlens=kept.edges)
        kept.hidden, kept.after = output.last_hidden_state, cache.layers


def held_tensors(layers: list[LayerCache]) -> list[Tensor]:
    """All tensors of some caches, by name in each layer."""
    return [held[name] for layer in layers for held in (layer.memory, layer.context) for name in sorted(held)]


def replace_tensors(layers: list[LayerCache], tensors: list[Tensor]) -> None:
    """Put tensors in the order of `held_tensors` in place of those."""
    new = iter(tensors)
    for layer in layers:
        for held in (layer.memory, layer.context):
            held.update({name: next(new) for name in sorted(held)})
