"""generate() of transformers, with the models' own cache."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache as once
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ..checks import check_dense, check_size
from ..private_huggingface import defer_ends, keep_after_generation
from .assisted import AssistedGeneration
from .cache import CACHE_NAME, FastWeightsCache, check_cache, given_cache
from .decoding import DecodeSteps, can_replay
from .inputs import check_ids, check_token, is_batch
from .kept_graphs import describe_model, graphs_of
from .late_end import LateEnd, can_end_late
from .prompt_graphs import PromptReader
from .prompts import move_padding_to_front, prefill_block
from .rows import check_mask, check_prompts

__all__ = ["CachedGenerationMixin", "check_cache_settings"]

# Of the running generate(): its caches and the readers of its prompts.
_decoding: ContextVar[list[FastWeightsCache] | None] = ContextVar("decoding", default=None)
_reading: ContextVar[list[PromptReader] | None] = ContextVar("reading", default=None)
_ending: ContextVar[LateEnd | None] = ContextVar("ending", default=None)


class CachedGenerationMixin(AssistedGeneration, GenerationMixin):
    """Greedy search, sampling, beam search and assisted decoding with a `FastWeightsCache`.

    A prompt is read in one pass where the GPU's memory allows it, otherwise in the largest blocks that fit. On a CPU blocks
    have 512 tokens. `prefill_chunk_size` sets the block. Prompts of different lengths come with their attention_mask, which
    shows the padding. Each prompt is continued from its last token, on whichever side it is padded.

    On a GPU the step of one token is captured as a CUDA graph and replayed, but not where disable_compile is set in transformers'
    generation settings, or a module has hooks. Later calls with as many sequences replay it too, until a weight or a setting of a
    module changes, or the model is trained. So do graphs that read short prompts, which are captured at the end of the first call
    with prompts of their size. The graphs of a model and their caches hold at most a 32nd of the GPU's memory.
    """

    config: Any  # a FastWeightsConfig; transformers declares its own base class

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers. With a cache (past_key_values or cache) the prompt holds the tokens that the cache has read and
        at least one more. Ids may also be the new tokens alone, with an attention_mask of both."""
        cache = given_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        prompt, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        prompt = inputs if prompt is None else prompt
        self._check_call(prompt, generation_config or self.generation_config, kwargs)
        if (
            isinstance(cache, FastWeightsCache) and cache.recording is None
        ):  # an assistant's prompts are transformers' own
            _check_reading(cache, prompt, kwargs.get("inputs_embeds"), mask)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            check_prompts(mask, len(mask), mask.shape[1] - _columns(cache))
        decoding, reading, seen = _decoding.set([]), _reading.set([]), {id(cache)}
        try:
            result = super().generate(inputs, generation_config, *args, **kwargs)
            seen.add(id(getattr(result, CACHE_NAME, None)))
            for reader in _reading.get() or []:
                reader.finish()
            return result
        finally:
            for used in _decoding.get() or []:
                used.end_steps(kept=id(used) in seen)
            _decoding.reset(decoding)
            _reading.reset(reading)

    def release_step_graphs(self) -> None:
        """Free the memory of the captured prompts and steps that later calls of `generate()` would replay."""
        graphs_of(self).clear()  # type: ignore[arg-type]  # this is a model

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers, which looks for inputs_embeds among the arguments. The cache is past_key_values in every version:
        PEFT 0.21 looks for it under this name, puts the virtual tokens of prompt tuning in front of each step where it finds
        none, and puts a prefix of keys and values there, which the model refuses."""
        kwargs["inputs_embeds"] = inputs_embeds
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if CACHE_NAME in inputs:
            inputs["past_key_values"] = inputs.pop(CACHE_NAME)
        return inputs

    def read_prompt(
        self,
        input_ids: Any,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The model reads padding in front of the tokens. What generate() returns keeps the columns of the prompt as they were
        given.

        The model reads a prompt in blocks, but in one pass where
        - hidden states are asked for, or embeddings are given: blocks would lose them;
        - a cache holds its beginning: before transformers 5.15 blocks would begin with the tokens that the cache has read;
        - virtual tokens stand in front of it (prompt tuning), whatever prefill_chunk_size is: PEFT would cut each block after the
          first to its last token.

        `PromptReader` may read a short one, and `DecodeSteps` the tokens after it.
        """
        cache, settings = model_kwargs.get(CACHE_NAME), generation_config
        can_split = isinstance(cache, FastWeightsCache) and not _columns(cache) and not settings.output_hidden_states
        prepare = self.prepare_inputs_for_generation  # PEFT puts its own here for prompt tuning and its kin
        if getattr(prepare, "__self__", self) is not self:
            settings.prefill_chunk_size = None
        elif can_split and settings.prefill_chunk_size is None and model_kwargs.get("inputs_embeds") is None:
            rows, length = input_ids.shape
            block = prefill_block(self, rows, length)
            if block < length:
                settings.prefill_chunk_size = block  # of this call's own settings
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            input_ids, model_kwargs = move_padding_to_front(input_ids, model_kwargs, mask.shape[1] - _columns(cache))
        shown = settings.output_hidden_states or settings.output_attentions
        if not isinstance(cache, FastWeightsCache) or shown or settings.disable_compile or not can_replay(self):
            return super().read_prompt(input_ids, generation_config, model_kwargs, *args, **kwargs)
        find_key = once(partial(describe_model, self))  # type: ignore[arg-type]  # this is a model
        if cache.recording is None and settings.prefill_chunk_size is None:
            cache.prompts = PromptReader(self, find_key)
            if (readers := _reading.get()) is not None:
                readers.append(cache.prompts)
        try:
            outputs = super().read_prompt(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            cache.prompts = None
        if cache.recording is None:
            # max_length counts the ids alone: neither embeddings nor tokens that only the cache has read.
            cache.steps = DecodeSteps(self, cache.columns + settings.max_length - input_ids.shape[1], find_key)
            if (begun := _decoding.get()) is not None:
                begun.append(cache)
        return outputs

    def decode_one_by_one(self, input_ids: Tensor, mode: dict[str, Any], model_kwargs: dict[str, Any]) -> Any:
        """As in transformers. On a GPU the host looks for the end one token late where nobody sees that."""
        end = None
        if can_end_late(input_ids.device, mode, model_kwargs):
            longest, sampled = mode["stopping_criteria"].max_length, mode["generation_config"].do_sample
            end = LateEnd(input_ids, model_kwargs[CACHE_NAME], longest, sampled)
        ending = _ending.set(end)
        try:
            with torch.cuda.device_of(input_ids):  # on whose stream transformers records events
                result = super().decode_one_by_one(input_ids, mode, model_kwargs)
        finally:
            _ending.reset(ending)
        return result if end is None else end.finish(result)

    def goes_on(self, ended: bool | Tensor, ask: Callable[[], bool]) -> bool:
        end = _ending.get()
        return ask() if end is None else end.goes_on(ended, ask)

    def _check_call(self, prompt: object, settings: GenerationConfig, kwargs: dict[str, Any]) -> None:
        """Check what transformers would pass on unchecked: the prompt, the mask, sizes, and special tokens that the vocabulary
        lacks."""
        given = kwargs.get("inputs_embeds")
        if prompt is not None:
            given = check_ids(prompt, self)
        for name in ("attention_mask", "inputs_embeds", "position_ids"):
            if isinstance(x := kwargs.get(name), Tensor):
                check_dense(name, x)
        mask = kwargs.get("attention_mask")
        if mask is not None and is_batch(given):
            batch, time = given.shape[:2]
            # With a cache the mask may be longer, and cover the tokens that the cache has read.
            check_mask(mask, batch, min(time, mask.shape[-1]) if isinstance(mask, Tensor) else time)
        for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} must be None in generate(), which continues every row; pass each document as a row of its own"
                )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            token = kwargs.get(name, getattr(settings, name))
            check_token(
                name, token.tolist() if isinstance(token, Tensor) else token, self.config.vocab_size, several=True
            )
        for name in ("max_new_tokens", "prefill_chunk_size", "num_beams", "num_return_sequences"):
            size = kwargs.get(name, getattr(settings, name))
            if size is not None:
                check_size(name, size)
        cache = kwargs.get(CACHE_NAME)
        if cache is not None:
            check_cache(cache, self.config.num_hidden_layers)

    def prepare_cache(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], batch_size: int) -> None:
        """Refuse a cache of another kind, and make one where the caller gives none."""
        check_cache_settings(generation_config)
        if generation_config.is_assistant:
            model_kwargs.pop("position_ids", None)  # of the other model, where this one counts by itself
        cache = model_kwargs.get(CACHE_NAME)
        if isinstance(cache, FastWeightsCache):  # another kind is refused by the model
            expected = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            if cache.batch_size not in (-1, expected):
                raise ValueError(
                    f"past_key_values must hold {expected} sequences, one per prompt and beam, got {cache.batch_size}; call its "
                    "batch_repeat_interleave with the number of beams or returned sequences first"
                )
            keep_after_generation(cache)
        elif cache is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = FastWeightsCache.empty(self.config.num_hidden_layers)


def _may_end_late(cache: object) -> bool:
    """Whether the cache is that of a call whose end may be seen late, and its tokens come from steps."""
    end = _ending.get()
    return end is not None and cache is end.cache and end.cache.steps is not None


defer_ends(_may_end_late)


def check_cache_settings(settings: GenerationConfig) -> None:
    """ValueError for settings of generate() that need a cache of another kind."""
    if settings.cache_implementation not in (None, "dynamic_full"):  # which transformers 5.6 asks of every assistant
        raise ValueError(
            "cache_implementation must be None: the model's own cache is the only one that holds its memories, got "
            f"{settings.cache_implementation!r}"
        )


def _columns(cache: object) -> int:
    """How many columns of a prompt the cache has read."""
    return cache.get_seq_length() if isinstance(cache, FastWeightsCache) else 0


def _check_reading(
    cache: FastWeightsCache, prompt: Tensor | None, embeddings: Tensor | None, mask: Tensor | None
) -> None:
    """ValueError unless the prompt holds more than the cache has read. transformers skips as many columns of the prompt as the
    cache has read, for embeddings even where the mask shows that all of them are new."""
    whole = "pass the whole prompt, with the tokens that the cache has read first and at least one token more"
    given = prompt if embeddings is None else embeddings
    if not is_batch(given):
        return  # refused elsewhere
    length = (given if mask is None else mask).shape[1]
    columns = _columns(cache)
    if columns >= length:
        raise ValueError(f"past_key_values has read {columns} tokens and the prompt has {length}: {whole}")
    if embeddings is not None and columns and embeddings.shape[1] != length:
        raise ValueError(
            f"inputs_embeds must be as long as attention_mask with past_key_values, {length}, got {embeddings.shape[1]}: {whole}"
        )
