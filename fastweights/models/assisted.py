"""Assisted decoding of transformers' generate(): with a smaller model, from the prompt (prompt lookup), or from the model's own
first layers. The model reads the drafted tokens in one call, and its cache takes back those that it would not have chosen."""

from __future__ import annotations

import copy
from functools import cache as once
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..private_huggingface import GenerationHooks, mask_length
from .cache import CACHE_NAME, FastWeightsCache
from .decoding import can_replay
from .draft_graphs import DraftReader
from .kept_graphs import describe_model
from .prompts import move_padding_to_front
from .recording import RecordingCache

__all__ = ["AssistedGeneration"]

LAST = 2  # tokens of a prompt that are read with the first draft: an assistant may have to take back the last one
PER_COLUMN = ("attention_mask", "position_ids", "token_type_ids")


class AssistedGeneration(GenerationHooks):
    """Assisted decoding for models whose cache records what it reads, as the model or as the assistant of another one."""

    def decode_assisted(self, input_ids: Tensor, mode: dict[str, Any], model_kwargs: dict[str, Any]) -> Any:
        """As in transformers. The cache records from the last tokens of the prompt on: transformers would read the prompt with
        the first draft, in one call."""
        cache, prompt = model_kwargs.get(CACHE_NAME), input_ids
        if not isinstance(cache, RecordingCache):  # transformers refuses to go without
            return super().decode_assisted(input_ids, mode, model_kwargs)
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "inputs_embeds must be None in assisted decoding, whose drafts follow token ids; pass the prompt as input_ids"
            )
        if getattr(self.prepare_inputs_for_generation, "__self__", self) is not self:  # PEFT's own
            raise ValueError(
                "assisted decoding cannot count the virtual tokens of prompt tuning and its kin; generate without an assistant"
            )
        mask, columns = model_kwargs.get("attention_mask"), input_ids.shape[1]
        given = mask_length(mode["generation_config"], mask)
        if given not in (None, columns):
            raise ValueError(
                f"input_ids must be the whole prompt in assisted decoding, as long as attention_mask, {given}, got "
                f"{columns}; put the tokens that past_key_values has read in front"
            )
        if mask is None:  # an assistant's generate() would take tokens that it has drafted for padding
            mask = torch.ones_like(input_ids)
        model_kwargs = {**model_kwargs, "attention_mask": mask}
        input_ids, model_kwargs = move_padding_to_front(input_ids, model_kwargs, columns - cache.get_seq_length())
        self.begin_recording(input_ids, mode["generation_config"], model_kwargs)
        try:
            result = super().decode_assisted(input_ids, mode, model_kwargs)
            cache.end_recording(self)
        finally:
            if isinstance(cache, FastWeightsCache) and cache.drafts is not None:
                cache.drafts.leave_slots(cache)
                cache.drafts = None
        sequences = result if isinstance(result, Tensor) else result.sequences
        sequences[:, :columns] = prompt  # the padding where it was
        return result

    def read_prompt(
        self,
        input_ids: Any,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """An assistant records from the last tokens of its prompt on."""
        if generation_config.is_assistant:
            self.begin_recording(input_ids, generation_config, model_kwargs)
            generation_config.prefill_chunk_size = None  # of this call's own settings; few tokens are left
        return super().read_prompt(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def begin_recording(self, input_ids: Tensor, settings: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        """Read the prompt but for its last tokens, and let the cache record what follows, unless it does so already. On a GPU
        graphs may read what follows."""
        cache = model_kwargs.get(CACHE_NAME)
        if not isinstance(cache, RecordingCache) or cache.recording is not None:
            return
        new_ids = input_ids[:, cache.get_seq_length() : -LAST]
        if new_ids.shape[1]:
            first = {name: x[..., :-LAST] for name in PER_COLUMN if (x := model_kwargs.get(name)) is not None}
            settings = copy.copy(settings)
            settings.is_assistant = False
            self.read_prompt(new_ids, settings, {**model_kwargs, **first})
        if isinstance(cache, FastWeightsCache):
            cache.end_steps()
            cache.drafts = find_reader(self, settings)
            if cache.drafts is not None and not cache.drafts.take_slots(cache):
                cache.drafts = None
        cache.activate_past_recording()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, whose assisted decoding asks for the whole prompt first: without what the cache has read."""
        cache: Any = kwargs.get(CACHE_NAME)
        mask = kwargs.get("attention_mask")
        is_whole = mask is not None and mask.shape[1] == input_ids.shape[1]  # a block of a prompt has a longer mask
        records = isinstance(cache, RecordingCache) and cache.recording is not None
        if next_sequence_length is None and is_whole and records:
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length, *args, **kwargs)  # type: ignore[misc]


def find_reader(model: Any, settings: GenerationConfig) -> DraftReader | None:
    """Reads drafted tokens by graphs. None where they cannot be captured, as on a CPU."""
    if settings.disable_compile or not can_replay(model):
        return None
    return DraftReader(model, once(partial(describe_model, model)))
