"""Small causal language models of transformers that are none of ours."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fastweights.models import HybridModel, linearize

SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options)).eval()


def gemma(**options: Any) -> PreTrainedModel:
    """With a window in one layer, and bounded logits."""
    torch.manual_seed(0)
    windows = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    bound = {"final_logit_softcapping": 3.0}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES | windows | bound | options)).eval()


def hybrid(keep: str = "1", **options: Any) -> HybridModel:
    """A memory in the first layer, attention in the second."""
    return linearize(llama(**options), to="gdn", keep=keep)
