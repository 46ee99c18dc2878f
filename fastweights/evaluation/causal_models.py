"""The steps from tokens to logits of any causal language model of transformers, ours or another: cache, final hidden states,
output layer. Logits then exist for as many tokens as a caller wants at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..layers.norms import at_least_float32
from ..models import FastWeightsCache, HybridCache, HybridModel
from ..models.hybrid.cache import attention_state_size
from ..models.modeling import FastWeightsPreTrainedModel

__all__ = [
    "OutputHead",
    "copy_cache",
    "empty_cache",
    "final_hidden",
    "is_other",
    "output_head",
    "state_size",
    "token_logits",
]


class OutputHead(NamedTuple):
    """What turns final hidden states h into logits: h W^T + b, and with a softcap c, c tanh((h W^T + b) / c)."""

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None


def is_other(model: Any) -> bool:
    """Whether a model is one of transformers' own or a hybrid of one, which have caches of another kind than ours."""
    return isinstance(model, PreTrainedModel) and not isinstance(model, FastWeightsPreTrainedModel)


def empty_cache(model: Any) -> Any:
    """A cache that has read nothing."""
    if not is_other(model):
        return FastWeightsCache.empty(model.config.num_hidden_layers)
    return HybridCache(model.config) if isinstance(model, HybridModel) else DynamicCache(config=model.config)


def copy_cache(cache: Any) -> Any:
    """An independent cache at the same point; that of our models costs nothing."""
    return cache.copy() if isinstance(cache, FastWeightsCache) else copy.deepcopy(cache)


def state_size(model: Any, length: int) -> int:
    """How many numbers the cache of a model holds per sequence after `length` tokens: memories, keys and values."""
    if hasattr(model, "state_size"):
        return model.state_size(length)
    held = empty_cache(model).layers
    return sum(
        attention_state_size(block.self_attn, layer, length)
        for block, layer in zip(model.model.layers, held, strict=True)
    )


def final_hidden(
    model: Any,
    input_ids: Tensor,
    mask_BS: Tensor | None = None,
    forward: Callable[..., Any] | None = None,
    **inputs: Any,
) -> Tensor:
    """Final hidden states [B, T, D] of tokens [B, T], as the output layer gets them.

    mask: 0 for padding; of these tokens, after those in a cache. forward: called in place of the model, for its own forward where
    another one has taken its place. inputs: others of the model's forward, such as past_key_values.
    """
    if not is_other(model):
        return model.model(input_ids, attention_mask=mask_BS, **inputs).last_hidden_state
    if mask_BS is not None:  # padding on the left moves no position, as in generate(), which continues from the cache
        positions_BS = (mask_BS.long().cumsum(1) - 1).clamp_min(0)
        inputs = {"position_ids": positions_BS[:, -input_ids.shape[1] :], **inputs}
    found: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda module, args, outputs: found.append(outputs[0]))
    try:
        (forward or model)(input_ids, attention_mask=mask_BS, logits_to_keep=1, **inputs)
    finally:
        hook.remove()
    return found[0]


def output_head(model: Any) -> OutputHead:
    """The output layer of a model."""
    layer = model.lm_head
    return OutputHead(
        layer.weight, getattr(layer, "bias", None), getattr(model.config, "final_logit_softcapping", None)
    )


def token_logits(model: Any, hidden_BTD: Tensor) -> Tensor:
    """Logits of final hidden states, in float32 or better."""
    logits = at_least_float32(model.lm_head(hidden_BTD))
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
