"""Short prompts, read by replaying a CUDA graph, which leaves the host almost no work.

A graph has a fixed number of tokens. It reads N prompts of any lengths packed into one row, and padding after them as one
sequence more, of which nothing is kept. So few graphs serve all lengths, and no layer mixes padding with a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cuda_graphs import captured, padded_prompt, refusing_waits
from ..layers import LayerCache
from ..layers.attention import unread_lengths
from .cache import FastWeightsCache
from .kept_graphs import graphs_of, kind_of_call, may_refuse_packed
from .rows import Rows

__all__ = ["PromptReader"]

MOST = 4096  # tokens of all prompts: more of them take a GPU longer than the host takes to launch the kernels


@dataclass(eq=False)
class KeptPrompts:
    """A reading of N prompts, with everything that its replays read and write.

    Attributes:
        key, serves, bytes: as in `Kept`.
        ids: [1, T], the tokens of the prompts, then padding.
        edges: int64 [N+2], cumulative lengths of the prompts and the padding.
        graph: None where the model is called: before a graph is captured, and on a CPU, in tests.
        logits: [N, 1, vocab_size] after the prompts.
        layers: the caches of N+1 sequences. Each reading overwrites them.
    """

    key: Hashable
    serves: Hashable
    ids: Tensor
    edges: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor | None = None
    layers: list[LayerCache] | None = None
    bytes: int = 0

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def fill(self, ids: Tensor, rows: Rows) -> None:
        """Take the tokens [N, L] of these rows."""
        packed = rows.pack(ids[..., None]).flatten()
        self.ids.zero_()[0, : len(packed)].copy_(packed)
        if rows.cu_seqlens is None:
            torch.arange(0, ids.numel() + 1, ids.shape[1], out=self.edges[:-1])
        else:
            self.edges[:-1].copy_(rows.cu_seqlens)


class PromptReader:
    """Reads the prompts of one `generate()`.

    The first prompts of a size are read by calling the model, packed as well, so that all calls round alike. Their graph is
    captured at the end of that `generate()`, for the calls after it (`finish`): nobody waits for it before the first token, and
    what the model needs to be captured is there. A capture takes about as long as one more reading.

    Args:
        model: a FastWeightsForCausalLM.
        find_key: gives `describe_model` of it.
    """

    def __init__(self, model: Any, find_key: Callable[[], Hashable]) -> None:
        self.model, self.find_key = model, find_key
        self.called: tuple[KeptPrompts, int] | None = None  # a reading that was not captured yet, with its width

    def read(self, ids: Tensor | None, mask: Tensor | None, cache: FastWeightsCache) -> Tensor | None:
        """Logits [N, 1, vocab_size] after prompts [N, L], which the cache has then read. None where they come in another form or
        after others, are too long, one is empty, or the model cannot be captured."""
        if ids is None or cache.columns or cache.is_initialized or (mask is not None and mask.shape != ids.shape):
            return None
        rows = Rows(len(ids), ids.shape[1], attention_mask=mask)
        shortest = longest = rows.time
        if rows.lengths is not None:
            shortest, longest = torch.stack(rows.lengths.aminmax()).tolist()
        width = padded_prompt(longest)
        if not shortest or rows.count * width > MOST:
            return None
        kept = self._find(ids, rows, width)
        if kept is None or not self._run(kept, width):
            return None
        assert kept.logits is not None and kept.layers is not None
        logits, blocks = kept.logits.clone(), self.model.model.layers
        cache.layers = [
            block.mixer.cache_of_first(layer, rows.count, longest, same_length=not rows.masked)
            for block, layer in zip(blocks, kept.layers)
        ]
        cache.advance(rows.time, None, rows.lengths)
        if kept.bytes:
            self._keep(kept)
        else:
            self.called, kept.logits, kept.layers = (kept, width), None, None
        return logits

    @torch.no_grad()
    def finish(self) -> None:
        """Capture the reading for later calls."""
        if self.called is not None:
            kept, width = self.called
            if self._capture(kept, width):
                self._keep(kept)
            else:
                graphs_of(self.model).refuse(kept.serves)

    def _keep(self, kept: KeptPrompts) -> None:
        if not graphs_of(self.model).put(kept):
            graphs_of(self.model).refuse(kept.serves)

    def _find(self, ids: Tensor, rows: Rows, width: int) -> KeptPrompts | None:
        """A reading of prompts of this size, filled with these."""
        key, graphs = self.find_key(), graphs_of(self.model)
        if key is None:
            return None
        serves = kind_of_call("prompts", rows.count, width, self.model.config.num_hidden_layers, ids.device)
        kept = graphs.take(key, serves)
        if kept is not None:
            kept.fill(ids, rows)
            return kept
        if graphs.refuses(serves):
            return None
        tokens = rows.count * width
        kept = KeptPrompts(
            key, serves, ids.new_zeros(1, tokens), torch.full((rows.count + 2,), tokens, device=ids.device)
        )
        kept.fill(ids, rows)
        return kept

    def _run(self, kept: KeptPrompts, width: int) -> bool:
        """False where the model may read the prompts in another form alone. What is wrong in any form is raised again by the call
        that follows."""
        if kept.graph is not None:
            kept.graph.replay()
            return True
        try:
            self._call(kept, width)
        except Exception as error:
            if not may_refuse_packed(self.model, error):
                raise
            graphs_of(self.model).refuse(kept.serves)
            return False
        return True

    def _capture(self, kept: KeptPrompts, width: int) -> bool:
        """False where the model waits for the GPU, or memory does not hold the graph."""
        device = kept.device
        kept.bytes = kept.ids.nbytes + kept.edges.nbytes
        if device.type != "cuda":  # in tests
            return True
        before = torch.cuda.memory_reserved(device)

        def call() -> None:
            with refusing_waits():
                self._call(kept, width)

        try:
            kept.graph, _ = captured(call, device)
        except RuntimeError:
            return False
        kept.bytes += max(0, torch.cuda.memory_reserved(device) - before)
        return True

    def _call(self, kept: KeptPrompts, width: int) -> None:
        """Let the model read the prompts. No more than `width` tokens of each."""
        body, cache = self.model.model, FastWeightsCache.empty(self.model.config.num_hidden_layers)
        with unread_lengths(width):
            x_1TD = body(kept.ids, past_key_values=cache, use_cache=True, cu_seqlens=kept.edges).last_hidden_state
        last_ND = x_1TD[0].index_select(0, kept.edges[1:-1] - 1)
        kept.logits, kept.layers = self.model.lm_head(last_ND[:, None]), cache.layers
