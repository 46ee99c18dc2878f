"""generate() of transformers, with the models' own cache."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from .cache import FastWeightsCache

__all__ = ["CachedGenerationMixin"]


class CachedGenerationMixin(GenerationMixin):
    """Greedy search, sampling and beam search with a `FastWeightsCache`.

    `prefill_chunk_size` reads the prompt in blocks. Prompts of different lengths are padded on the left and come with their
    attention_mask. What takes tokens back (assisted, speculative, prompt-lookup decoding) is refused.
    """

    config: Any  # a FastWeightsConfig; transformers declares its own base class

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """transformers' hook for models with a cache of their own: put one into model_kwargs."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "cache_implementation must be None: the model's own cache is of constant size and the only one that fits, "
                f"got {generation_config.cache_implementation!r}"
            )
        if generation_config.is_assistant:
            raise ValueError(
                f"{type(self).__name__} cannot be the assistant of assisted decoding: rejected tokens would have to be "
                "taken out of its memory again"
            )
        if model_kwargs.get("past_key_values") is not None:
            model_kwargs["past_key_values"]._is_user_defined = True  # generate() asks whether the cache outlives it
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = FastWeightsCache.empty(self.config.num_hidden_layers)
