"""The end of an answer, seen one token late: the host does not wait for the GPU before it launches the next step.

A loop that asks after every token whether all sequences have ended lets the GPU wait for the host, .1 to .2 ms per token. The
answer to the question is copied to the host meanwhile, and read before the next but one token. Where it says that all have ended,
one extra token was decoded. It is cut off, and random numbers continue as if it had not been drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..private_huggingface import is_kept_after_generation
from .cache import CACHE_NAME, FastWeightsCache

__all__ = ["LateEnd", "can_end_late"]

# Processors and criteria of transformers that only look at tokens. They keep no state and call nothing of the caller.
PURE = frozenset(
    (
        "MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria", "StopStringCriteria",
        "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
        "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
        "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "NoBadWordsLogitsProcessor",
        "SequenceBiasLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty", "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
        "InfNanRemoveLogitsProcessor", "LogitNormalization",
    )
)  # fmt: skip


def can_end_late(device: torch.device, mode: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> bool:
    """Whether nobody sees the extra token: generate() returns token ids alone, and it has made the cache.

    Args:
        mode: arguments of transformers' decoding loop. model_kwargs: those of the model.
    """
    settings, cache = mode["generation_config"], model_kwargs.get(CACHE_NAME)
    if device.type != "cuda" or not isinstance(cache, FastWeightsCache) or is_kept_after_generation(cache):
        return False
    if settings.return_dict_in_generate or settings.is_assistant or mode.get("synced_gpus"):
        return False
    if mode.get("streamer") is not None:
        return False
    called = (*(mode.get("logits_processor") or ()), *(mode.get("stopping_criteria") or ()))
    return all(type(one).__name__ in PURE and type(one).__module__.startswith("transformers.") for one in called)


class Flag:
    """A truth value on its way to the host."""

    def __init__(self, value: Tensor) -> None:
        on_gpu = value.device.type == "cuda"
        self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=on_gpu).copy_(value, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(value.device))

    def __bool__(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._value)


class LateEnd:
    """Of one call of `generate()` by greedy search or sampling.

    Args:
        ids: the prompts.
        cache: that the call decodes with.
        longest: columns at which the answer ends in any case; None for no such limit.
        sampled: whether random numbers are drawn.
    """

    def __init__(self, ids: Tensor, cache: FastWeightsCache, longest: int | None, sampled: bool) -> None:
        self.cache, self.longest, self.sampled = cache, longest, sampled
        self.device = ids.device
        self.columns = ids.shape[1]  # of the answer so far
        self._last: Flag | None = None  # whether all had ended one token before
        self._random: Tensor | None = None  # the generator before the last token
        self._has_extra = False  # Where transformers defers its look, it cuts the token off itself.

    def goes_on(self, ended: bool | Tensor, ask: Callable[[], bool]) -> bool:
        """Whether another token is decoded. It is called before every one, the first included.

        Args:
            ended: whether all sequences have, on the GPU or, where transformers has looked at it, on the host.
            ask: the answer of transformers, which looks at it.
        """
        last, self._last = self._last, None
        if last:
            self._has_extra = True
            return False
        if isinstance(ended, Tensor) and self.cache.decodes_by_steps():
            if self.longest is not None and self.columns >= self.longest:
                return False
            self._last = Flag(ended)
        elif not ask():
            return False
        self.columns += 1
        if self.sampled and self.device.type == "cuda" and self.cache.steps is not None:
            self._random = torch.cuda.get_rng_state(self.device)
        return True

    def finish(self, sequences: Tensor) -> Tensor:
        """What generate() returns, without the extra token."""
        if self._has_extra:
            sequences = sequences[:, :-1]
        # Shorter than what was drawn: the extra token was cut off here or by transformers.
        if self._random is not None and sequences.shape[1] < self.columns:
            torch.cuda.set_rng_state(self._random, self.device)
        return sequences.contiguous()
