"""A model's continuation of a text."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from ..checks import (
    LARGEST_COUNT,
    check_flag,
    check_number,
    check_positive,
    check_size,
    check_unicode,
    check_whole_number,
    describe_value,
)
from ..kinds import checked
from ..terminal import shown
from .reading import check_model, check_tokenizer, evaluating, prompt_tokens

__all__ = ["TimedStreamer", "continue_text"]


@checked
def continue_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    greedy: bool = False,
    seed: int | None = None,
    block: int | None = None,
    streamer: Any = None,
    prompt_lookup: int | None = None,
    draft: Any = None,
) -> str:
    """The model's continuation of `prompt`, up to its end-of-text token or `max_new_tokens`.

    Args:
        prompt: any text; from an empty one the model starts a new text.
        temperature: logits are divided by it before sampling.
        top_p: sampling is among the most likely tokens that together have this probability (Holtzman et al. 2020).
        greedy: take the most likely token each time; temperature, top_p and seed then play no part.
        seed: of sampling, 0 or more; a new one each time when None.
        block: tokens of the prompt that are read at a time; chosen for the device's free memory when None.
        streamer: a transformers streamer (`TextStreamer`), which is given the tokens as they come.
        prompt_lookup: how many tokens to draft at a time from an earlier place in the text that goes on alike (Saxena 2023). The
            model reads a draft in one call and keeps what it would have written itself.
        draft: a smaller model of the same vocabulary that drafts tokens (Leviathan et al. 2023).

    Raises:
        ValueError: a number out of its range, both kinds of drafts, a draft of another vocabulary, an empty prompt and a
            tokenizer without a token that starts or ends texts, or a model whose logits are not finite.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    check_unicode("prompt", prompt)
    check_flag("greedy", greedy)
    check_size("max_new_tokens", max_new_tokens, high=LARGEST_COUNT)
    if block is not None:
        check_size("block", block, high=LARGEST_COUNT)
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must be one of transformers' streamers, or None, got {describe_value(streamer)}")
    assistant = _assistant(model, prompt_lookup, draft)
    sampling = {} if greedy else _sampling(temperature, top_p, seed)
    end = tokenizer.eos_token_id
    tokens = (
        prompt_tokens(tokenizer, prompt) or [token for token in (tokenizer.bos_token_id, end) if token is not None][:1]
    )
    if not tokens:
        raise ValueError(
            "prompt must hold at least one token, got none, and the tokenizer has no token that starts a text"
        )
    ids = torch.tensor([tokens], device=model.device)
    with evaluating(model), nullcontext() if draft is None else evaluating(draft):
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            num_beams=1,
            eos_token_id=model.generation_config.eos_token_id if end is None else end,
            pad_token_id=end or 0,  # fills up finished sequences of a batch, and there is but one
            prefill_chunk_size=block,
            logits_processor=[_finite],
            streamer=streamer,
            **assistant,
            **sampling,
        )
    return tokenizer.decode(generated[0, len(tokens) :], skip_special_tokens=True)


def _assistant(model: Any, prompt_lookup: int | None, draft: Any) -> dict[str, Any]:
    """The checked arguments of generate() that say who drafts tokens."""
    if draft is None:
        return {} if prompt_lookup is None else {"prompt_lookup_num_tokens": check_size("prompt_lookup", prompt_lookup)}
    if prompt_lookup is not None:
        raise ValueError(
            "draft must be None where prompt_lookup is given: either drafts the tokens; leave one of them out"
        )
    check_model(draft, "draft")
    own, other = (x.config.get_text_config().vocab_size for x in (model, draft))
    if own != other:
        raise ValueError(
            f"draft must have the vocabulary of the model, {own} tokens, got {other}; take one with the same tokenizer"
        )
    return {"assistant_model": draft}


def _sampling(temperature: float, top_p: float, seed: int | None) -> dict[str, float]:
    """The checked arguments of sampling, for generate()."""
    temperature = check_positive("temperature", temperature)
    check_number("top_p", top_p, above=0, high=1)
    if seed is not None:
        torch.manual_seed(check_whole_number("seed", seed))
    return {"temperature": temperature, "top_p": top_p, "top_k": 0}


def _finite(ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
    """Refuses NaN and infinite logits, where sampling would fail with an error that does not name the model. Changes nothing."""
    if not logits_BV.amax().isfinite():  # -inf alone is what a forbidden token has
        raise ValueError("model must give finite logits, got NaN or infinite ones; its weights are damaged")
    return logits_BV


class TimedStreamer(TextStreamer):
    """Prints tokens as they come, without the prompt, and notes when."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(shown(text, sys.stdout), stream_end=stream_end)

    def put(self, value: Tensor) -> None:
        super().put(value)
        # One entry for the prompt, which comes first, and one per token.
        self.times += [time.perf_counter()] * (value.numel() if self.times else 1)

    def speed(self) -> str:
        """How many tokens came, the time to the first, in which the prompt was read, and how many per second after it."""
        tokens = len(self.times) - 1
        came = "1 token" if tokens == 1 else f"{tokens} tokens"
        if tokens < 1:
            return came
        came += f", the first after {1e3 * (self.times[1] - self.times[0]):,.0f} ms"
        later = tokens - self.times.count(self.times[1])
        return came if later < 1 else f"{came}, then {later / (self.times[-1] - self.times[1]):,.1f} per second"
