"""What hybrids of all families have in common: memories in place of attention, padding and packing, the cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...checks import check_whole_number
from ...ops.framework.sequences import check_cu_seqlens
from ...private_huggingface import keep_after_generation
from ..assisted import AssistedGeneration
from ..cache import CACHE_NAME, given_cache
from ..generation import check_cache_settings
from ..recording import reads_again
from ..rows import Rows, cumulative_lengths, own_columns, predicted_labels
from .cache import HybridCache, attention_state_size, check_hybrid_cache
from .kept import KeptAttention, keep_attention, leave_out_mask

__all__ = ["HybridModel"]


class HybridModel(AssistedGeneration):
    """In front of a class for causal language models of transformers. `config.memory` says which layers have a memory.

    Attributes:
        attention_class: the family's attention with a memory.
        kept_class: the family's attention where it is kept.
    """

    attention_class: ClassVar[type[nn.Module]]
    kept_class: ClassVar[type[KeptAttention]]
    counts_positions = False
    _predicts_labels = True
    config: Any
    model: Any
    training: bool

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        for index, (block, entry) in enumerate(zip(self.model.layers, config.memory, strict=True)):
            if entry is None:
                self.keep(block.self_attn)
            else:
                block.self_attn = self.attention_class(config, index)
        self.model.register_forward_pre_hook(leave_out_mask, with_kwargs=True)

    def keep(self, attention: nn.Module) -> nn.Module:
        """An attention module of the family as one of this model. It is changed in place."""
        return keep_attention(attention, self.kept_class, self.config)

    def memory_layers(self) -> dict[int, Any]:
        """The attention modules that have a memory, by the number of their layer."""
        return {
            index: self.model.layers[index].self_attn
            for index, entry in enumerate(self.config.memory)
            if entry is not None
        }

    @reads_again
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, with packed rows.

        Args:
            attention_mask: [B, T] (with a cache also longer, cached tokens first), 1 for tokens and 0 for padding.
            position_ids: int [B, T] or [1, T]. Where they do not rise by one, the next document of a packed row begins. Their
                values are read, which waits for a GPU; cu_seqlens avoid that.
            cu_seqlens, cu_seq_lens_q, cu_seq_lens_k: int [N+1], cumulative lengths of documents packed into one row.
            labels: the input ids. -100 is ignored, and so are padding and the first token of every document.
            input_ids, past_key_values, inputs_embeds, use_cache, cache, logits_to_keep, kwargs: as in transformers.

        Raises:
            ValueError: an input that does not fit.
        """
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        batch, time = tokens.shape[:2]
        past = given_cache(past_key_values, cache)
        if past is not None:
            check_hybrid_cache(past, self.config)
        edges = cumulative_lengths(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
        check_cu_seqlens(edges, batch, time)
        documents = dict(attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=edges)
        if labels is not None:
            labels = predicted_labels(labels, **documents)
        rows = None
        if edges is not None or time > 1 or past is None:  # a single token per sequence continues them all
            rows = Rows(batch, time, **documents)
        packed = rows is not None and rows.count != batch
        masked = rows is None or rows.masked
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        if past is None and use_cache:
            past = HybridCache(self.config)
        if packed and (masked or past is not None):
            raise ValueError(
                "packed rows must have no padding and no cache: attention_mask must be 1 for tokens and 0 for padding, and "
                "use_cache False for rows of several documents"
            )
        if edges is not None:
            documents["position_ids"] = positions_of(edges, time, tokens.device)
        elif position_ids is None and attention_mask is not None and self.memory_layers():
            # As generate() counts them. A memory may see where a token is, and not only how far it is from others.
            counted_BS = (attention_mask != 0).long().cumsum(1) - 1
            documents["position_ids"] = own_columns(counted_BS, time).clamp_min(0)
        if past is None and not masked:  # transformers looks for packed documents where there is no mask
            documents["attention_mask"] = None
        if rows is not None and rows.cu_seqlens is None:
            rows = None
        dropped = self.training and self.config.attention_dropout > 0  # which is for transformers' own attention
        apart = rows is not None and past is None and not masked and not dropped
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=documents["attention_mask"],
            position_ids=documents["position_ids"],
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=past is not None,
            logits_to_keep=logits_to_keep,
            memory_rows=rows,
            packed_rows=rows if apart else None,
            **{CACHE_NAME: past},
            **kwargs,
        )

    def prepare_cache(self, generation_config: Any, model_kwargs: dict[str, Any], batch_size: int) -> None:
        check_cache_settings(generation_config)
        given = given_cache(model_kwargs.get("past_key_values"), model_kwargs.get("cache"))
        if given is not None:
            check_hybrid_cache(given, self.config)
            keep_after_generation(given)
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = HybridCache(self.config)

    def state_size(self, length: int = 1) -> int:
        """How many numbers the cache holds per sequence after `length` tokens: memories, and keys and values where attention was
        kept (of its window, where it has one)."""
        check_whole_number("length", length)
        memories, held = self.memory_layers(), HybridCache(self.config).layers
        return sum(
            memories[index].memory.state_size(length)
            if index in memories
            else attention_state_size(block.self_attn, layer, length)
            for index, (block, layer) in enumerate(zip(self.model.layers, held, strict=True))
        )


def positions_of(cu_seqlens: Tensor, time: int, device: torch.device) -> Tensor:
    """[1, T]: positions within the documents of a packed row, from their cumulative lengths, without a wait for a GPU."""
    position = torch.arange(time, device=device)
    edges = cu_seqlens.to(device).long()
    document = torch.searchsorted(edges, position, right=True) - 1
    return (position - edges[document])[None]
